"""Saved in any layout, loaded in any other, at other numbers of ranks: bitwise the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megascale.checkpoint import FullReader, Piece, find_latest, load_checkpoint, save_checkpoint
from tests.checkpoint.layouts import LOADS, SAVES, Layout, empty, reference, rows, whole
from tests.distributed import run_ranks


def _differences(got: list[Piece], wanted: list[Piece]) -> list[str]:
    assert len(got) == len(wanted) > 0
    return [a.key for a, b in zip(got, wanted, strict=True) if not torch.equal(a.tensor, b.tensor)]


def _save(rank: int, world_size: int, root: str, layout: Layout) -> str:
    pieces = layout(rank, world_size, reference())
    return str(save_checkpoint(Path(root), 7, pieces, {}, group=dist.group.WORLD))


def _load(rank: int, world_size: int, paths: list[str]) -> list[Any]:
    failures = []
    for path in paths:
        for layout in LOADS:
            pieces = layout(rank, world_size, empty())
            load_checkpoint(Path(path), pieces, group=dist.group.WORLD)
            wrong = _differences(pieces, layout(rank, world_size, reference()))
            failures += [(path, layout.__name__, key) for key in wrong]
    return failures


def _save_and_load_all(rank: int, world_size: int, root: str) -> list[Any]:
    paths = [_save(rank, world_size, root, layout) for layout in SAVES]
    return _load(rank, world_size, paths)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_loads_into_every_other(tmp_path: Path, world_size: int) -> None:
    assert run_ranks(_save_and_load_all, world_size, str(tmp_path)) == [[]] * world_size


def test_two_ranks_to_four_ranks_to_one_process(tmp_path: Path) -> None:
    paths = [run_ranks(_save, 2, str(tmp_path), layout)[0] for layout in SAVES]
    assert run_ranks(_load, 4, paths) == [[]] * 4
    for path in paths:
        tensors = empty()
        load_checkpoint(Path(path), [whole(key, tensor) for key, tensor in tensors.items()])
        assert all(torch.equal(tensors[key], value) for key, value in reference().items())


def test_safetensors_itself_reads_what_is_saved(tmp_path: Path) -> None:
    path = Path(run_ranks(_save, 2, str(tmp_path), rows)[0])
    with safe_open(path / "rank-00001.safetensors", "pt") as file:
        lower = file.get_tensor("master/layers.0.attn.q.weight@6,0")
    assert torch.equal(lower, reference()["master/layers.0.attn.q.weight"][6:])


def test_strided_and_shared_storage_saves_only_the_view(tmp_path: Path) -> None:
    base = torch.randn(1000, 100)
    view = base.t()[5:7, 100:140]  # 80 elements in storage order of their own
    path = save_checkpoint(tmp_path, 1, [whole("master/a", view)], {})
    assert sum(file.stat().st_size for file in path.iterdir()) < 8000
    assert torch.equal(FullReader(path).read("master/a"), view)
    target = torch.zeros(40, 2)
    load_checkpoint(path, [whole("master/a", target.t())])
    assert torch.equal(target, view.t())


@pytest.mark.gpu
def test_cuda_tensors(tmp_path: Path) -> None:
    saved = {key: value.cuda() for key, value in reference().items()}
    for layout in SAVES:
        pieces = [piece for rank in range(2) for piece in layout(rank, 2, saved)]
        save_checkpoint(tmp_path, 1, pieces, {})
        path = find_latest(tmp_path)
        assert path is not None
        loaded: dict[str, Tensor] = {key: value.cuda() for key, value in empty().items()}
        load_checkpoint(path, [whole(key, tensor) for key, tensor in loaded.items()])
        assert all(torch.equal(loaded[key].cpu(), value) for key, value in reference().items())
