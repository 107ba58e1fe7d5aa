"""What each rank writes, and that all ranks together write each element exactly once.

Ranks exchange a hash of what they write at every save. Only when one of them writes something else
than at the save before are the entries themselves sent, to the writer, and checked: a plan of
thousands of ranks is made once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.layout import Entry
from megascale.checkpoint.pieces import Piece, check_tiling
from megascale.errors import CheckpointError


def arrange(pieces: Iterable[Piece]) -> tuple[list[Piece], list[Entry]]:
    """The order of `pieces` in a file, the widest first so that all are aligned, and their places
    in it. Those without an element are left out."""
    ordered = sorted(
        (piece for piece in pieces if piece.num_bytes),
        key=lambda piece: -piece.tensor.element_size(),
    )
    entries, start = [], 0
    for piece in ordered:
        entries.append(Entry(piece.key, piece.global_shape, piece.box, piece.tensor.dtype, start))
        start = entries[-1].stop
    return ordered, entries


class Tiling:
    """The last layout that all ranks agreed on, by its hash."""

    def __init__(self) -> None:
        self._agreed: bytes | None = None

    def agree(self, entries: Sequence[Entry], ranks: Ranks) -> None:
        """Collective. Raises CheckpointError on all ranks where the entries do not tile."""
        own = hashlib.sha256(repr(entries).encode()).digest()
        told = ranks.gather(lambda: (own, self._agreed))
        layout = hashlib.sha256(b"".join(hashed for hashed, _ in told)).digest()
        if all(agreed == layout for _, agreed in told):
            return
        parts = ranks.gather_at_writer(lambda: list(entries))
        ranks.writer_does(lambda: check_tiled(parts))
        self._agreed = layout


def check_tiled(parts: Iterable[Iterable[Entry]]) -> None:
    """`parts`: of each rank."""
    by_key: dict[str, list[Entry]] = {}
    for part in parts:
        for entry in part:
            by_key.setdefault(entry.key, []).append(entry)
    for key, entries in by_key.items():
        first = entries[0]
        for entry in entries:
            if (entry.global_shape, entry.dtype) != (first.global_shape, first.dtype):
                raise CheckpointError(
                    f"{key}: ranks disagree, {first.global_shape} {first.dtype} and "
                    f"{entry.global_shape} {entry.dtype}; they must run one model"
                )
        check_tiling(key, first.global_shape, [entry.box for entry in entries])
