"""`Piece`: a rectangle of a logical tensor in live storage: the only thing saved or loaded.

State is keyed by logical name and global offset, never by rank, so any layout loads into any other.

Invariant of a save: over all ranks the pieces of a key tile its global shape exactly once
(`check_tiling`); who writes what all hold (replicated, tied, data-parallel copies) is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from torch import Tensor

from megascale.errors import CheckpointError
from megascale.shards import Block, Box, range_boxes


@dataclass(frozen=True)
class Piece:
    """`tensor`, of shape `box.shape`, holds `box` of the logical tensor `key`.

    key           kind and logical name: `master/layers.3.attn.q.weight`, `exp_avg/...`
    global_shape  of the whole logical tensor
    tensor        a view of live storage, on any device, of any strides; a load writes into it
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    def __post_init__(self) -> None:
        assert tuple(self.tensor.shape) == self.box.shape, (self.key, self.tensor.shape, self.box)
        corners = zip(self.box.offset, self.box.shape, self.global_shape, strict=True)
        assert all(start >= 0 and start + n <= size for start, n, size in corners), self

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()


def pieces_of_range(
    prefix: str, blocks: Iterable[Block], flat: Tensor, start: int, stop: int
) -> list[Piece]:
    """Pieces `prefix/<logical name>` of elements [start, stop) of a storage tensor.

    `flat` [stop - start] is what this data-parallel rank owns of the flattened storage; the pieces
    are views of it. Elements that belong to no block (padding) belong to no piece.
    """
    assert flat.shape == (stop - start,), (prefix, flat.shape, start, stop)
    pieces = []
    for block in blocks:
        first, last = max(block.start, start), min(block.stop, stop)
        if first >= last:
            continue
        for inside, box in range_boxes(block.box, first - block.start, last - block.start):
            begin = block.start + inside - start
            view = flat[begin : begin + box.num_elements].view(box.shape)
            pieces.append(Piece(f"{prefix}/{block.name}", block.global_shape, box, view))
    return pieces


def check_tiling(key: str, global_shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Refuse boxes that do not cover each element of `global_shape` exactly once."""
    got, wanted = sum(box.num_elements for box in boxes), prod(global_shape)
    overlap = _first_overlap(boxes)
    if overlap:
        raise CheckpointError(
            f"{key}: {overlap[0]} and {overlap[1]} are both written; exactly one rank must write "
            "each element (leave out replicated and tied copies on the others)"
        )
    if got != wanted:
        raise CheckpointError(
            f"{key}: the ranks together write {got} elements, its shape {global_shape} has "
            f"{wanted}; exactly one rank must write each element"
        )


def _first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Sweep along axis 0, so that only boxes that share rows are compared."""
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.shape:
            active = [a for a in active if a.offset[0] + a.shape[0] > box.offset[0]]
        for other in active:
            if box.intersect(other):
                return other, box
        active.append(box)
    return None
