"""Where the pieces of a checkpoint lie, and what of them a piece of live storage needs. Pure.

Headers of all files give `Entry`s; a `Want` is what a rank asks for. `Saved` finds the entries that
overlap a want without comparing all with all: the entries of a key are sorted by their first row,
so a want looks only at those that share rows with it.
"""

from __future__ import annotations

import difflib
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from megascale.checkpoint.layout import Entry
from megascale.checkpoint.pieces import Piece
from megascale.errors import CheckpointError
from megascale.shards import Box


class Want(NamedTuple):
    """What a piece needs: `box` of the logical tensor `key`, which has `global_shape`."""

    key: str
    global_shape: tuple[int, ...]
    box: Box


def wants_of(pieces: Iterable[Piece]) -> tuple[Want, ...]:
    return tuple(Want(piece.key, piece.global_shape, piece.box) for piece in pieces)


def digest(wants: Sequence[Want]) -> str:
    """Equal where the same is wanted in the same order."""
    told = "\n".join(
        f"{want.key} {want.global_shape} {want.box.offset} {want.box.shape}" for want in wants
    )
    return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True)
class SavedTensor:
    """A logical tensor as it was saved."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Rows:
    """The entries of one key, by their first row."""

    def __init__(self, entries: list[tuple[int, Entry]]) -> None:
        self.entries = sorted(entries, key=lambda item: item[1].box.offset)
        self._first = [_first_row(entry.box) for _, entry in self.entries]
        # of each and all before it, so that it only grows and can be searched
        self._stop = list(accumulate((_stop_row(entry.box) for _, entry in self.entries), max))
        self._exact = {entry.box: (file, entry) for file, entry in self.entries}

    def overlapping(self, box: Box) -> Iterator[tuple[int, Entry, Box]]:
        if not box.num_elements:
            return
        exact = self._exact.get(box)
        if exact is not None:  # entries tile the tensor: there is no other
            yield *exact, box
            return
        begin = bisect_right(self._stop, _first_row(box))
        end = bisect_left(self._first, _stop_row(box))
        for file, entry in self.entries[begin:end]:
            common = entry.box.intersect(box)
            if common is not None:
                yield file, entry, common


class Saved:
    """The pieces of some files of a checkpoint, by key."""

    def __init__(self, files: Mapping[int, Sequence[Entry]]) -> None:
        by_key: dict[str, list[tuple[int, Entry]]] = {}
        for file, entries in files.items():
            for entry in entries:
                by_key.setdefault(entry.key, []).append((file, entry))
        self._rows = {key: _Rows(entries) for key, entries in by_key.items()}

    @property
    def keys(self) -> list[str]:
        return sorted(self._rows)

    def tensor(self, key: str) -> SavedTensor | None:
        rows = self._rows.get(key)
        if rows is None:
            return None
        entry = rows.entries[0][1]
        return SavedTensor(entry.global_shape, entry.dtype)

    def overlapping(self, want: Want) -> Iterator[tuple[int, Entry, Box]]:
        """(file, entry, what the entry and the want have in common)."""
        rows = self._rows.get(want.key)
        return iter(()) if rows is None else rows.overlapping(want.box)

    def covers(self, want: Want) -> bool:
        found = sum(common.num_elements for _, _, common in self.overlapping(want))
        return found == want.box.num_elements

    def refuse_another_model(self, wants: Iterable[Want], where: str) -> None:
        """Raise CheckpointError for what was not saved, or was saved in another shape."""
        for want in wants:
            saved = self.tensor(want.key)
            if saved is None:
                near = difflib.get_close_matches(want.key, self._rows, n=1)
                raise CheckpointError(
                    f"a checkpoint of another model: it has no {want.key!r}"
                    + (f" (nearest: {near[0]!r})" if near else "")
                    + "; use the model configuration that it was saved with"
                )
            if saved.shape != want.global_shape:
                raise CheckpointError(
                    f"a checkpoint of another model: {want.key!r} was saved as {saved.shape}, "
                    f"wanted {want.global_shape}; use the model configuration that it was saved "
                    "with"
                )
            if not self.covers(want):
                raise CheckpointError(
                    f"{where}: its files do not hold all of {want.key!r}; use another checkpoint"
                )

    def refuse_unasked(self, asked: set[str], where: str) -> None:
        """Of each kind of state that is asked for, every saved tensor must be."""
        kinds = {key.split("/")[0] for key in asked}
        left = [key for key in self.keys if key not in asked and key.split("/")[0] in kinds]
        if left:
            more = f" and {len(left) - 1} tensors more" if len(left) > 1 else ""
            raise CheckpointError(
                f"a checkpoint of another model: {where} also holds {left[0]!r}{more}, for which "
                "this model has no place; use the model configuration that it was saved with"
            )


def _first_row(box: Box) -> int:
    return box.offset[0] if box.offset else 0


def _stop_row(box: Box) -> int:
    return box.offset[0] + box.shape[0] if box.offset else 1
