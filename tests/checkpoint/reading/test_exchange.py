"""Real ranks, real files, blocks of 64 bytes: any layout into any other, each byte read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.reading import Files, Limits, PlanCache, read_pieces, wants_of
from megascale.storage import LocalFolder
from tests.checkpoint.layouts import LOADS, SAVES, Layout, empty, reference
from tests.checkpoint.reading.saving import CountingFolder, save_files
from tests.distributed import run_ranks

BLOCK_BYTES = 64


def _save(root: Path, world_size: int, layout: Layout) -> Files:
    pieces = [layout(rank, world_size, reference()) for rank in range(world_size)]
    return save_files(root / layout.__name__, pieces, block_bytes=BLOCK_BYTES)


def _load(files: Files, rank: int, world_size: int, layout: Layout) -> list[str]:
    pieces = layout(rank, world_size, empty())
    ranks = Ranks(dist.group.WORLD if world_size > 1 else None)
    plan = PlanCache().plan(files, wants_of(pieces), ranks, Limits(BLOCK_BYTES, 2 * BLOCK_BYTES))
    read_pieces(files, plan, pieces, ranks, patience_s=20)
    wanted = layout(rank, world_size, reference())
    assert len(wanted) == len(pieces) > 0
    return [
        f"{layout.__name__} {got.key}"
        for got, want in zip(pieces, wanted, strict=True)
        if not torch.equal(got.tensor, want.tensor)
    ]


def _load_all(rank: int, world_size: int, saved: list[Files]) -> Any:
    wrong, ranges = [], []
    for files in saved:
        for layout in LOADS:
            counting = CountingFolder(Path(files.storage.url))
            again = Files(counting, files.folder, files.manifest, BLOCK_BYTES)
            wrong += _load(again, rank, world_size, layout)
            ranges.append(counting.ranges)
    return wrong, ranges


@pytest.mark.parametrize("loaded_by", [1, 2, 3, 4])
@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_any_layout_into_any_other_each_byte_once(
    tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    saved = [_save(tmp_path, saved_by, layout) for layout in SAVES]
    told = run_ranks(_load_all, loaded_by, [_plain(files) for files in saved])
    assert [wrong for wrong, _ in told] == [[]] * loaded_by
    for number, files in enumerate(files for files in saved for _ in LOADS):
        ranges = [r for _, by_load in told for r in by_load[number]]
        total = sum(file.num_bytes for file in files.manifest.files.values())
        assert sum(num_bytes for _, _, num_bytes in ranges) == total
        assert len(set(ranges)) == len(ranges)
        loads = [sum(num for _, _, num in by_load[number]) for _, by_load in told]
        if LOADS[number % len(LOADS)].__name__ == "replicated":  # all tied, so evened out
            assert max(loads) - min(loads) <= 2 * 4096 + 2 * BLOCK_BYTES


def _plain(files: Files) -> Files:
    """With a storage that can be sent to another process."""
    storage = LocalFolder(Path(files.storage.url))
    return Files(storage, files.folder, files.manifest, BLOCK_BYTES)


def _load_on_device(rank: int, world_size: int, saved: list[Files]) -> list[str]:
    wrong = []
    for files in saved:
        for layout in LOADS:
            tensors = {key: tensor.cuda() for key, tensor in empty().items()}
            # another dtype on the way, for the kinds that allow it without a loss
            wider = {k: t.double() if t.dtype == torch.float32 else t for k, t in tensors.items()}
            pieces = layout(rank, world_size, wider)
            ranks = Ranks(dist.group.WORLD)
            plan = PlanCache().plan(
                files, wants_of(pieces), ranks, Limits(BLOCK_BYTES, 2 * BLOCK_BYTES)
            )
            read_pieces(files, plan, pieces, ranks, patience_s=20)
            wanted = layout(rank, world_size, reference())
            wrong += [
                f"{layout.__name__} {got.key}"
                for got, want in zip(pieces, wanted, strict=True)
                if not torch.equal(got.tensor.cpu(), want.tensor.to(got.tensor.dtype))
            ]
    return wrong


@pytest.mark.gpu
def test_blocks_go_to_a_device_through_pinned_memory(tmp_path: Path) -> None:
    """Two ranks on one device: the exchange is between hosts."""
    saved = [_plain(_save(tmp_path, 3, layout)) for layout in SAVES]
    assert run_ranks(_load_on_device, 2, saved) == [[]] * 2
