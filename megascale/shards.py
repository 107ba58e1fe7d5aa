"""Logical parameters and their shards, as data. No torch.

A *logical parameter* is one matrix or vector of the model as the field knows it (`layers.3.attn.q.
weight`), whatever storage holds it. A rank stores *fused* tensors (q, k and v in one matrix); each
fused tensor is a stack of `Block`s, one a logical parameter. Data parallelism then cuts the flat
buffers at arbitrary elements, so what a rank owns of a logical parameter is a range of a block.

Everything that outlives a layout (optimizer state, LAMB norms, checkpoints, gradient norms) speaks
of (logical name, `Box` in global coordinates), never of ranks: that is why any layout loads into
any other.

Invariant: over the ranks of one pipeline replica, the boxes of a logical parameter that are not
marked `replicated` tile its global shape exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod


@dataclass(frozen=True)
class Box:
    """A rectangle of a logical parameter, in global coordinates: `offset` and `shape` per axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common rectangle, or None where the two do not overlap."""
        starts = [max(a, b) for a, b in zip(self.offset, other.offset, strict=True)]
        stops = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(tuple(starts), shape)


@dataclass(frozen=True)
class Block:
    """One logical parameter's part inside a rank's storage tensor.

    name           logical name, for example `layers.3.attn.q.weight`
    global_shape   shape of the whole logical parameter (vocabulary unpadded)
    box            what this rank stores of it (its tensor-parallel shard)
    start          first element inside the flattened storage tensor; the block is contiguous there
                   and row-major in `box.shape`
    replicated     every tensor-parallel rank stores the same values; its gradient is partial on
                   each and must be summed over the group; counted once in norms and checkpoints
    counted        of the replicated ones, the one that checkpoints write (tensor rank 0)
    tied           another pipeline stage stores the same parameter; gradients are summed over both
    tied_copy      of those two, the one that norms and checkpoints do not count
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    replicated: bool = False
    counted: bool = True
    tied: bool = False
    tied_copy: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.box.num_elements

    @property
    def is_copy(self) -> bool:
        """Another rank of this data-parallel replica holds the same elements and counts them."""
        return self.tied_copy or (self.replicated and not self.counted)


def range_boxes(box: Box, start: int, stop: int) -> list[tuple[int, Box]]:
    """Cut elements [start, stop) of a row-major `box` into rectangles (at most 3 for a matrix).

    Returns (first element inside the box, rectangle in global coordinates) pairs in order: the end
    of a partial first row, the full rows, the beginning of a partial last row.
    """
    assert 0 <= start <= stop <= box.num_elements, (start, stop, box)
    if start == stop:
        return []
    if len(box.shape) <= 1:
        offset = (box.offset[0] + start,) if box.offset else ()
        return [(start, Box(offset, (stop - start,) if box.shape else ()))]
    assert len(box.shape) == 2, f"logical parameters have at most two axes, got {box.shape}"
    cols = box.shape[1]
    row0, col0 = box.offset
    pieces: list[tuple[int, Box]] = []

    def add(first: int, row: int, col: int, rows: int, width: int) -> None:
        pieces.append((first, Box((row0 + row, col0 + col), (rows, width))))

    row, col = divmod(start, cols)
    if col:
        width = min(cols - col, stop - start)
        add(start, row, col, 1, width)
        start += width
    full_rows = (stop - start) // cols
    if full_rows:
        add(start, start // cols, 0, full_rows, cols)
        start += full_rows * cols
    if start < stop:
        add(start, start // cols, 0, 1, stop - start)
    return pieces


class Placement(Enum):
    """How tensor parallelism treats a module's parameters (MegaScale 2, Figure 3)."""

    COLUMN = "column"  # rows of every block are split; bias too
    ROW = "row"  # columns are split; the bias is replicated and added after the reduce-scatter
    VOCAB = "vocab"  # rows of the vocabulary, padded to a multiple of the group, are split
    REPLICATED = "replicated"  # whole on every rank; partial gradients are summed over the group
