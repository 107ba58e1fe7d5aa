"""A digest is the same however a state is cut, and another for every state that is another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megascale.checkpoint import digest, digest_pieces, launch_digests, save_checkpoint
from megascale.checkpoint.digest import added, as_hex
from megascale.checkpoint.manifest import read_manifest
from megascale.checkpoint.pieces import Piece
from megascale.shards import Box
from tests.checkpoint.layouts import SAVES, reference, whole

MODULUS = 1 << 64


def _of(tensors: dict[str, Tensor]) -> dict[str, int]:
    return digest_pieces(whole(key, tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("layout", SAVES)
def test_parts_of_any_layout_add_up_to_the_whole(layout: object, world_size: int) -> None:
    assert callable(layout)
    parts = [digest_pieces(layout(rank, world_size, reference())) for rank in range(world_size)]
    assert added(parts) == _of(reference())


def test_it_is_the_sum_that_its_docstring_says() -> None:
    tensor = torch.tensor([[1, -2, 3], [4, 5, -6]], dtype=torch.int32)
    rows = digest._mixed(1, torch.arange(10, 12)).tolist()
    columns = digest._mixed(0, torch.arange(20, 23)).tolist()
    assert all(weight % 2 for weight in rows + columns)
    wanted = sum(
        int(tensor[r, c]) * rows[r] * columns[c] * digest._key_weight("master/a")
        for r in range(2)
        for c in range(3)
    )
    piece = Piece("master/a", (50, 50), Box((10, 20), (2, 3)), tensor)
    assert digest_pieces([piece]) == {"master": wanted % MODULUS}


def test_weights_are_splitmix64() -> None:
    """Compared with Python's own integers."""

    def mixed(index: int) -> int:
        z = ((index + 1) * 0x9E3779B97F4A7C15 + digest._hashed("axis 1")) % MODULUS
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
        return (z ^ (z >> 31)) | 1

    got = digest._mixed(1, torch.tensor([0, 1, 12345, 1 << 40]))
    assert [weight % MODULUS for weight in got.tolist()] == [
        mixed(index) for index in (0, 1, 12345, 1 << 40)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_change_is_seen(dtype: torch.dtype) -> None:
    state = {"master/a": (torch.randn(40, 30) * 100).to(dtype), "master/b": torch.ones(40, 30)}
    before = _of(state)

    def after(change: object) -> dict[str, int]:
        changed = {key: tensor.clone() for key, tensor in state.items()}
        assert callable(change)
        changed = change(changed) or changed
        return _of(changed)

    def flip(tensors: dict[str, Tensor]) -> None:
        tensors["master/a"].view(torch.uint8).view(-1)[77] ^= 1

    def two_signs(tensors: dict[str, Tensor]) -> None:
        tensors["master/a"][3, 4] *= -1
        tensors["master/a"][30, 7] *= -1

    def exchange(tensors: dict[str, Tensor]) -> None:
        tensors["master/a"][[0, 1]] = tensors["master/a"][[1, 0]]

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"master/b": tensors["master/a"], "master/a": tensors["master/b"]}

    assert after(lambda _: None) == before
    for change in (flip, two_signs, exchange, rename):
        assert after(change) != before, change.__name__


def test_large_tensors_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"master/a": torch.randn(37, 50), "master/b": torch.randn(1, 3000)}
    wanted = _of(tensors)
    monkeypatch.setitem(digest._CHUNK, "cpu", 64)
    assert _of(tensors) == wanted
    monkeypatch.setattr(digest, "_TABLE", 16)
    digest._table.cache_clear()
    assert _of(tensors) == wanted
    digest._table.cache_clear()


def test_any_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float64):
        tensor = torch.randn(30, 20).to(dtype)
        assert _of({"master/a": tensor.t()}) == _of({"master/a": tensor.t().contiguous()})


def test_a_manifest_has_it(tmp_path: Path) -> None:
    pieces = [whole("master/a", torch.tensor(3, dtype=torch.int32))]
    path = save_checkpoint(tmp_path, 1, pieces, {}, digests=digest_pieces(pieces))
    (value,) = digest_pieces(pieces).values()
    assert read_manifest(path).digests == {"master": f"{value:016x}"} == as_hex({"master": value})


@pytest.mark.gpu
def test_on_a_device_it_is_the_same() -> None:
    tensors = {**reference(), "master/large": torch.randn(5000, 4000).bfloat16()}
    on_device = [whole(key, tensor.cuda()) for key, tensor in tensors.items()]
    assert launch_digests(on_device)() == _of(tensors)
