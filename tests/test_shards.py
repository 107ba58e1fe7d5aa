"""Boxes and ranges: cut anywhere, the pieces put the matrix together again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megascale.shards import Block, Box, range_boxes


@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_a_cut_range_rebuilds_the_matrix(rows: int, cols: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, rows * cols))
    start = data.draw(st.integers(0, cut))
    box = Box((2, 3), (rows, cols))
    values = np.arange(rows * cols)
    whole = np.full((rows + 2, cols + 3), -1)
    pieces = range_boxes(box, start, cut)
    for first, piece in pieces:
        (r, c), (h, w) = piece.offset, piece.shape
        assert (whole[r : r + h, c : c + w] == -1).all(), "pieces overlap"
        whole[r : r + h, c : c + w] = values[first : first + h * w].reshape(h, w)
    inside = whole[2:, 3:].reshape(-1)
    assert (inside[start:cut] == values[start:cut]).all()
    assert (inside[:start] == -1).all()
    assert (inside[cut:] == -1).all()
    assert len(pieces) <= 3


def test_a_vector_range_is_one_piece() -> None:
    assert range_boxes(Box((10,), (8,)), 2, 5) == [(2, Box((12,), (3,)))]
    assert range_boxes(Box((10,), (8,)), 4, 4) == []


def test_intersection() -> None:
    a, b = Box((0, 0), (4, 4)), Box((2, 3), (4, 4))
    assert a.intersect(b) == Box((2, 3), (2, 1))
    assert b.intersect(a) == a.intersect(b)
    assert a.intersect(Box((4, 0), (1, 1))) is None


def test_block_stop_counts_its_elements() -> None:
    assert Block("w", (8, 4), Box((4, 0), (4, 4)), start=16).stop == 32
