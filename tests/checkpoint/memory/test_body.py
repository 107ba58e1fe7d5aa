"""The body of a slot holds pieces by name and box, and copies them there and back."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from megascale.checkpoint import Piece
from megascale.checkpoint.layout import encode_header
from megascale.checkpoint.memory import body as body_module
from megascale.checkpoint.memory.body import Body
from megascale.checkpoint.memory.slot import HEADER_BYTES, PAGE_BYTES
from megascale.shards import Box
from tests.checkpoint.layouts import LOADS, empty, reference, whole


def _image(body: Body) -> Tensor:
    image = torch.zeros(body.image_bytes, dtype=torch.uint8)
    body.copy_out(image)
    return image


def _put_back(body: Body, image: Tensor, *, num_parts: int = 1) -> None:
    """In `num_parts` parts of multiples of 8 bytes, in some order."""
    values, filling = image[body.start :], body.filling()
    step = max(-(-len(values) // num_parts) // 8 * 8, 8)
    starts = list(range(0, len(values), step))
    random.Random(3).shuffle(starts)
    for start in starts:
        filling.put(start, values[start : start + step])
    filling.finish()


def test_there_and_back_in_every_layout() -> None:
    for layout in LOADS:
        for rank in range(3):
            for num_parts in (1, 7):
                saved, loaded = reference(), empty()
                pieces, back_pieces = layout(rank, 3, saved), layout(rank, 3, loaded)
                body, back = (
                    Body(pieces[::2], pieces[1::2]),
                    Body(back_pieces[::2], back_pieces[1::2]),
                )
                assert back.table == body.table
                _put_back(back, _image(body), num_parts=num_parts)
                for before, after in zip(pieces, back_pieces, strict=True):
                    assert torch.equal(before.tensor, after.tensor), (before.key, before.box)


def test_the_table_says_what_lies_where() -> None:
    tensors = reference()
    pieces = [whole(key, tensor) for key, tensor in tensors.items()]
    body = Body(pieces[:4], pieces[4:])
    image = _image(body)
    first = (HEADER_BYTES + len(body.table) + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
    table = json.loads(body.table)
    assert table["num_counted"] == 4
    assert {row[0] for row in table["entries"][:4]} == {piece.key for piece in pieces[:4]}
    for key, shape, offset, box_shape, dtype, start in table["entries"]:
        tensor = tensors[key]
        assert (tuple(shape), tuple(box_shape)) == (tensor.shape, tensor.shape)
        assert set(offset) <= {0}
        num_bytes = tensor.numel() * tensor.element_size()
        values = image[first + start : first + start + num_bytes].view(getattr(torch, dtype))
        assert torch.equal(values.view(tensor.shape), tensor), key


def test_the_counted_part_is_the_values_of_a_checkpoint_file() -> None:
    """Header and that range of the slot open with the safetensors library, whatever the types."""
    tensors = reference() | {"bytes": torch.arange(7, dtype=torch.uint8)}
    pieces = [whole(key, tensor) for key, tensor in tensors.items()]
    body = Body(pieces[2:], pieces[:2])
    image = _image(body)
    assert body.start % 4096 == 0
    counted = image[body.start : body.start + body.entries[-1].stop]
    file = load(encode_header(body.entries) + counted.numpy().tobytes())
    assert len(file) == len(tensors) - 2
    for piece in pieces[2:]:
        name = f"{piece.key}@{','.join('0' * piece.tensor.ndim)}"
        assert torch.equal(file[name], piece.tensor), name
    assert body.num_bytes > len(counted), "copies lie behind"


def test_neighbours_in_storage_are_one_copy() -> None:
    flat = torch.arange(60.0)
    boxes = [(0, 10), (10, 30), (40, 60)]  # a gap before the last
    pieces = [
        Piece(f"master/{i}", (b - a,), Box((0,), (b - a,)), flat[a:b])
        for i, (a, b) in enumerate(boxes)
    ]
    body = Body(pieces)
    assert body.num_copies == 2
    image = _image(body)
    flat[:] = -1.0
    _put_back(body, image)
    assert flat.tolist() == [*map(float, range(30)), *[-1.0] * 10, *map(float, range(40, 60))]


def test_what_is_counted_and_what_follows_it_in_storage_are_not_joined_over_a_gap() -> None:
    """40 bytes are counted; the copies start at 64."""
    flat = torch.arange(20.0)
    pieces = [
        Piece(f"master/{i}", (10,), Box((0,), (10,)), flat[10 * i : 10 * i + 10]) for i in (0, 1)
    ]
    body = Body(pieces[:1], pieces[1:])
    assert (body.num_copies, body.num_bytes) == (2, 64 + 40)
    image = _image(body)
    flat.zero_()
    _put_back(body, image)
    assert flat.tolist() == [float(i) for i in range(20)]


def test_values_without_neighbours_in_memory_are_put_together() -> None:
    """A column of a matrix, in parts that cut it."""
    matrix = torch.arange(200.0).view(100, 2)
    body = Body([whole("master/column", matrix[:, 1])])
    image = _image(body)
    matrix.zero_()
    _put_back(body, image, num_parts=5)
    assert matrix[:, 1].tolist() == [float(i) for i in range(1, 200, 2)]
    assert not matrix[:, 0].any()


def test_other_cuts_have_other_tables() -> None:
    values = torch.arange(12.0)

    def pieces(*sizes: int) -> list[Piece]:
        parts = values.split(list(sizes))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Piece("master/a", (12,), Box((start,), tuple(part.shape)), part)
            for start, part in zip(starts, parts, strict=True)
        ]

    tables = {Body(pieces(*s)).table_crc for s in ((12,), (6, 6), (4, 8), (8, 4))}
    halves = pieces(6, 6)
    tables.add(Body(halves[:1], halves[1:]).table_crc)
    assert len(tables) == 5
    assert Body(pieces(6, 6)).table_crc in tables


def test_long_stretches_are_copied_and_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "_PART_BYTES", 40)
    tensors = [torch.arange(37.0), torch.arange(3.0), torch.arange(24.0).view(4, 6).T]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    pieces = [
        Piece(f"master/{number}", shape, Box((0,) * len(shape), shape), tensor)
        for number, (shape, tensor) in enumerate(zip(shapes, tensors, strict=True))
    ]
    body = Body(pieces)
    told: list[int] = []
    image = torch.zeros(body.image_bytes, dtype=torch.uint8)
    body.copy_out(image, told.append)
    values = image[body.start :].view(torch.float32)
    assert torch.equal(values, torch.cat([tensor.flatten() for tensor in tensors]))
    assert told == [40, 80, 120, 160, 256]
