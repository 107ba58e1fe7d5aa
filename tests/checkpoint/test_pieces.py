"""Pieces of flat ranges against an index table; what does not tile is refused by name."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megascale.checkpoint.pieces import Piece, check_tiling, pieces_of_range
from megascale.errors import CheckpointError
from megascale.shards import Block, Box

# A fused storage: the second tensor-parallel half of q [8, 5] and k [4, 5], 3 elements of padding,
# and a bias. The value of an element is its place in its logical tensor.
BLOCKS = [
    Block("q", (8, 5), Box((4, 0), (4, 5)), start=0),
    Block("k", (4, 5), Box((2, 0), (2, 5)), start=20),
    Block("bias", (6,), Box((3,), (3,)), start=33),
]
STORAGE = torch.cat(
    [torch.arange(20, 40), torch.arange(10, 20), torch.full((3,), -1), torch.arange(3, 6)]
)


@given(st.integers(0, 36), st.integers(0, 36))
def test_pieces_of_a_range_hold_what_their_boxes_say(start: int, stop: int) -> None:
    start, stop = sorted((start, stop))
    flat = STORAGE[start:stop].clone()
    pieces = pieces_of_range("master", BLOCKS, flat, start, stop)
    for piece in pieces:
        logical = torch.arange(torch.Size(piece.global_shape).numel()).view(piece.global_shape)
        for axis, (offset, length) in enumerate(zip(*astuple(piece.box), strict=True)):
            logical = logical.narrow(axis, offset, length)
        assert torch.equal(piece.tensor, logical), piece
    assert sum(piece.tensor.numel() for piece in pieces) == int((flat >= 0).sum())


def test_pieces_are_views_of_the_flat_tensor() -> None:
    flat = STORAGE[3:17].clone()
    pieces = pieces_of_range("master", BLOCKS, flat, 3, 17)
    assert [piece.key for piece in pieces] == ["master/q"] * 3
    for piece in pieces:
        piece.tensor.zero_()
    assert not flat.any()


def test_a_piece_must_fit_its_tensor_and_its_shape() -> None:
    with pytest.raises(AssertionError):
        Piece("master/a", (4, 4), Box((0, 0), (2, 4)), torch.zeros(3, 4))
    with pytest.raises(AssertionError):
        Piece("master/a", (4, 4), Box((3, 0), (2, 4)), torch.zeros(2, 4))


def test_exact_tilings_pass() -> None:
    check_tiling("a", (), [Box((), ())])
    check_tiling("a", (5,), [Box((3,), (2,)), Box((0,), (3,))])
    check_tiling("a", (4, 4), [Box((0, 0), (4, 1)), Box((0, 1), (1, 3)), Box((1, 1), (3, 3))])


@pytest.mark.parametrize(
    ("shape", "boxes", "message"),
    [
        ((4, 4), [Box((0, 0), (3, 4))], r"master/a: .* write 12 elements, .* has 16"),
        ((4, 4), [Box((0, 0), (4, 4)), Box((2, 2), (1, 1))], r"master/a: .* are both written"),
        # As many elements as the tensor has, two of them twice, two never.
        ((4, 2), [Box((0, 0), (3, 2)), Box((2, 0), (1, 2))], r"master/a: .* are both written"),
        ((), [Box((), ()), Box((), ())], r"master/a: .* are both written"),
    ],
)
def test_gaps_and_overlaps_are_refused(
    shape: tuple[int, ...], boxes: list[Box], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_tiling("master/a", shape, boxes)
