"""Where the pieces of a rank lie in a slot's body, and the copies to there and back.

    [0, counted)   what this rank writes to a checkpoint on disk (`entries`), without gaps
    [copies, end)  what it needs to go on and another rank writes

The counted part lies as it does in a file of a checkpoint (`checkpoint/layout.py`): such a file is
`encode_header(entries)` and that range of the slot, moved as it is. Values are ordered by the size
of their elements, widest first, so that none needs a gap before it. The table names all pieces by
key and global box. Pieces that are neighbours in live storage are copied as one: a model of
thousands of parameters is a few copies.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megascale.checkpoint.layout import Entry
from megascale.checkpoint.memory.hashing import crc_of
from megascale.checkpoint.memory.slot import body_start
from megascale.checkpoint.pieces import Piece

_ALIGNMENT = 64  # bytes: of the first copy
_PART_BYTES = 1 << 30  # of a copy: 20 ms from a device


@dataclass(frozen=True)
class _Stretch:
    """Live elements that are contiguous, from byte `start` of the body on."""

    tensor: Tensor
    start: int

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


class Body:
    """The layout of a rank's pieces. Equal pieces give equal tables, in every process.

    counted  over all ranks these tile the state once
    copies   the rest of what the rank holds
    """

    def __init__(self, counted: Iterable[Piece], copies: Iterable[Piece] = ()) -> None:
        self._stretches: list[_Stretch] = []
        self.entries, num_counted = self._place(counted, 0)
        first_copy = -(-num_counted // _ALIGNMENT) * _ALIGNMENT
        others, end = self._place(copies, first_copy)
        self.num_bytes = end if others else num_counted
        rows = [
            [e.key, e.global_shape, e.box.offset, e.box.shape, _name(e.dtype), e.start]
            for e in (*self.entries, *others)
        ]
        table = {"num_counted": len(self.entries), "entries": rows}
        self.table = json.dumps(table, separators=(",", ":")).encode()
        self.table_crc = crc_of(self.table)

    def _place(self, pieces: Iterable[Piece], position: int) -> tuple[tuple[Entry, ...], int]:
        """Entries from `position` on, and where they end."""
        entries = []
        for piece in sorted(pieces, key=lambda piece: -piece.tensor.element_size()):
            tensor = piece.tensor.detach()
            entry = Entry(piece.key, piece.global_shape, piece.box, tensor.dtype, position)
            entries.append(entry)
            last = self._stretches[-1] if self._stretches else None
            if last and last.start + last.num_bytes == position and _follows(tensor, last.tensor):
                self._stretches[-1] = _Stretch(_joined(last.tensor, tensor), last.start)
            else:
                self._stretches.append(_Stretch(tensor, position))
            position = entry.stop
        return tuple(entries), position

    @property
    def num_copies(self) -> int:
        return len(self._stretches)

    @property
    def start(self) -> int:
        """Of the values in the file."""
        return body_start(len(self.table))

    @property
    def image_bytes(self) -> int:
        """Of the file."""
        return self.start + self.num_bytes

    def copy_out(self, image: Tensor, passed: Callable[[int], None] = lambda _stop: None) -> None:
        """Live values to a slot. On CUDA queued in the current stream, and not waited for.

        passed  called behind every `_PART_BYTES` or so, with the byte of the body up to which all
                is queued
        """
        told = 0
        for live, start in self._parts():
            first, num_bytes = self.start + start, live.numel() * live.element_size()
            kept = image[first : first + num_bytes]
            kept.view(live.dtype).view(live.shape).copy_(live, non_blocking=True)
            if start + num_bytes - told >= _PART_BYTES:
                told = start + num_bytes
                passed(told)

    def _parts(self) -> Iterator[tuple[Tensor, int]]:
        """The stretches, those that are long and contiguous cut."""
        for stretch in self._stretches:
            live = stretch.tensor
            if stretch.num_bytes <= _PART_BYTES or not live.is_contiguous():
                yield live, stretch.start
                continue
            width = live.element_size()
            for number, part in enumerate(live.view(-1).split(_PART_BYTES // width)):
                yield part, stretch.start + number * (_PART_BYTES // width) * width

    def filling(self) -> Filling:
        return Filling(self._stretches)


class Filling:
    """Values on their way back to live storage, in parts, which may come in any order and from
    several threads. Each part starts and ends between elements."""

    def __init__(self, stretches: list[_Stretch]) -> None:
        self._stretches = stretches
        self._starts = [stretch.start for stretch in stretches]
        # what is not contiguous is put together beside, and copied at the end
        self._flat = [stretch.tensor.contiguous().view(-1) for stretch in stretches]

    @torch.no_grad()
    def put(self, start: int, values: Tensor) -> None:
        """`values` (uint8) are those from byte `start` of the body on. On CUDA queued in the
        current stream: `values` must stay until it has run."""
        stop = start + len(values)
        index = max(bisect_right(self._starts, start) - 1, 0)
        for stretch, flat in zip(self._stretches[index:], self._flat[index:], strict=True):
            if stretch.start >= stop:
                break
            first, last = max(stretch.start, start), min(stretch.start + stretch.num_bytes, stop)
            if first >= last:
                continue
            width = flat.element_size()
            part = flat[(first - stretch.start) // width : (last - stretch.start) // width]
            part.copy_(values[first - start : last - start].view(flat.dtype), non_blocking=True)

    @torch.no_grad()
    def finish(self) -> None:
        """All parts are there."""
        for stretch, flat in zip(self._stretches, self._flat, strict=True):
            if not stretch.tensor.is_contiguous():
                stretch.tensor.copy_(flat.view(stretch.tensor.shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _follows(tensor: Tensor, before: Tensor) -> bool:
    """Begins `tensor` in storage where `before` ends, both contiguous?"""
    return (
        tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and tensor.dtype == before.dtype
        and tensor.is_contiguous()
        and before.is_contiguous()
        and tensor.storage_offset() == before.storage_offset() + before.numel()
    )


def _joined(first: Tensor, second: Tensor) -> Tensor:
    num = prod(first.shape) + prod(second.shape)
    return first.as_strided((num,), (1,), first.storage_offset())
