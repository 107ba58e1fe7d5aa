"""The body of a slot holds pieces by name and box, and copies them there and back."""

from __future__ import annotations

import json

import torch

from megascale.checkpoint import Piece
from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.slot import ALIGNMENT, HEADER_BYTES
from megascale.shards import Box
from tests.checkpoint.layouts import LOADS, empty, reference, whole


def test_there_and_back_in_every_layout() -> None:
    for layout in LOADS:
        for rank in range(3):
            saved, loaded = reference(), empty()
            body = Body(layout(rank, 3, saved))
            image = torch.zeros(body.image_bytes, dtype=torch.uint8)
            body.copy_out(image)
            back = Body(layout(rank, 3, loaded))
            assert back.table == body.table
            back.copy_in(image)
            pieces = zip(layout(rank, 3, saved), layout(rank, 3, loaded), strict=True)
            for before, after in pieces:
                assert torch.equal(before.tensor, after.tensor), (before.key, before.box)


def test_the_table_says_what_lies_where() -> None:
    tensors = reference()
    pieces = [whole(key, tensor) for key, tensor in tensors.items()]
    body = Body(pieces)
    image = torch.zeros(body.image_bytes, dtype=torch.uint8)
    body.copy_out(image)
    first = (HEADER_BYTES + len(body.table) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    for key, shape, offset, box_shape, dtype, start in json.loads(body.table):
        tensor = tensors[key]
        assert (tuple(shape), tuple(box_shape)) == (tensor.shape, tensor.shape)
        assert set(offset) <= {0}
        assert start % ALIGNMENT == 0
        num_bytes = tensor.numel() * tensor.element_size()
        values = image[first + start : first + start + num_bytes].view(getattr(torch, dtype))
        assert torch.equal(values.view(tensor.shape), tensor), key


def test_neighbours_in_storage_are_one_copy() -> None:
    flat = torch.arange(60.0)
    boxes = [(0, 10), (10, 30), (40, 60)]  # a gap before the last
    pieces = [
        Piece(f"master/{i}", (b - a,), Box((0,), (b - a,)), flat[a:b])
        for i, (a, b) in enumerate(boxes)
    ]
    body = Body(pieces)
    assert body.num_copies == 2
    image = torch.zeros(body.image_bytes, dtype=torch.uint8)
    body.copy_out(image)
    flat[:] = -1.0
    body.copy_in(image)
    assert flat.tolist() == [*map(float, range(30)), *[-1.0] * 10, *map(float, range(40, 60))]


def test_other_cuts_have_other_tables() -> None:
    values = torch.arange(12.0)

    def table(*sizes: int) -> int:
        parts = values.split(list(sizes))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return Body(
            Piece("master/a", (12,), Box((start,), tuple(part.shape)), part)
            for start, part in zip(starts, parts, strict=True)
        ).table_crc

    assert len({table(12), table(6, 6), table(4, 8), table(8, 4)}) == 4
    assert table(6, 6) == table(6, 6)
