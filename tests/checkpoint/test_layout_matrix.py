"""Training state of every layout loads into every other, bitwise, each byte read once.

State is what `assemble` makes of a tiny model with tied embeddings in bf16: fp32 masters, moments,
in the pieces that training saves. Every value is a function of its key and place, so that a rank
knows what it must hold; parameters follow from the masters as after a resume.
"""

from __future__ import annotations

import zlib
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint import (
    Piece,
    PlanCache,
    agree_digests,
    digest_pieces,
    load,
    load_checkpoint,
    save_checkpoint,
)
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.manifest import read_manifest
from megascale.config import load_config
from megascale.shards import Box
from megascale.train.assemble import Assembly, assemble
from megascale.train.state import Progress, checkpoint_meta, state_pieces
from tests.checkpoint.reading.saving import CountingFolder
from tests.distributed import run_ranks
from tests.train.harness import TINY

CONSUMED_SAMPLES = 12345


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    vp: int
    dp: int
    zero: int

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        return "tp{}-pp{}-vp{}-dp{}-zero{}".format(*astuple(self))


LAYOUTS = [
    Layout(1, 1, 1, 1, 1),
    Layout(2, 1, 1, 1, 1),
    Layout(1, 2, 2, 1, 1),
    Layout(1, 1, 1, 2, 2),
    Layout(4, 1, 1, 1, 1),
    Layout(1, 1, 1, 4, 1),
    Layout(2, 1, 1, 2, 2),
    Layout(1, 2, 1, 2, 1),
    Layout(2, 2, 2, 2, 2),
]


def _assemble(layout: Layout) -> Assembly:
    config = load_config(
        None,
        [
            *TINY,
            "model.tie_embeddings=true",
            "training.dtype=bfloat16",
            f"parallelism.tensor_parallel_size={layout.tp}",
            f"parallelism.pipeline_parallel_size={layout.pp}",
            f"parallelism.virtual_pipeline_size={layout.vp}",
            f"parallelism.zero_stage={layout.zero}",
            "parallelism.bucket_mb=0.05",
        ],
    )
    return assemble(config, config.mesh(layout.world_size), torch.device("cpu"))


@lru_cache(maxsize=1024)
def _whole(key: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(shape, generator=generator)


def _wanted(key: str, shape: tuple[int, ...], box: Box) -> Tensor:
    tensor = _whole(key, shape)
    for axis, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor


def _group(layout: Layout) -> dist.ProcessGroup | None:
    return dist.group.WORLD if layout.world_size > 1 else None


def _save(rank: int, world_size: int, root: Path, layout: Layout) -> None:
    assembly = _assemble(layout)
    pieces = state_pieces(assembly.zero, assembly.optimizer, "counted")
    for piece in pieces:
        piece.tensor.detach().copy_(_wanted(piece.key, piece.global_shape, piece.box))
    meta = checkpoint_meta(assembly.config, Progress(3, CONSUMED_SAMPLES), 3)
    where, digests = root / layout.name, digest_pieces(pieces)
    save_checkpoint(where, 3, pieces, meta, group=_group(layout), digests=digests)


def _load_all(
    rank: int, world_size: int, root: Path, layout: Layout, saved: list[Layout]
) -> tuple[list[str], list[int]]:
    """What is wrong; bytes that this rank read, of each."""
    assembly = _assemble(layout)
    wrong, num_bytes = [], []
    for source in saved:
        told, read = _load(assembly, root / source.name / "step-00000003", layout)
        wrong += [f"{source.name} to {layout.name}: {what}" for what in told]
        num_bytes.append(read)
    return wrong, num_bytes


def _load(assembly: Assembly, path: Path, layout: Layout) -> tuple[list[str], int]:
    zero, group = assembly.zero, _group(layout)
    zero.wait_for_parameters()
    pieces = state_pieces(zero, assembly.optimizer, "all")
    for piece in pieces:
        piece.tensor.detach().fill_(torch.nan)
    storage = CountingFolder(path.parent)
    with mock.patch.object(load, "opened", return_value=(storage, path.name)):
        loaded = load_checkpoint(path, pieces, group=group)
    with torch.no_grad():
        zero.gather_parameters()
    zero.wait_for_parameters()
    counted = state_pieces(zero, assembly.optimizer, "counted")
    wrong = _different(pieces) + _different_parameters(assembly)
    if loaded.meta["consumed_samples"] != CONSUMED_SAMPLES:
        wrong.append("data position")
    if agree_digests(digest_pieces(counted), Ranks(group)) != loaded.digests:
        wrong.append("digests")
    return wrong, storage.num_bytes


def _different(pieces: list[Piece]) -> list[str]:
    return [
        piece.key
        for piece in pieces
        if not torch.equal(piece.tensor, _wanted(piece.key, piece.global_shape, piece.box))
    ]


def _different_parameters(assembly: Assembly) -> list[str]:
    """Of what forward uses: whole tensor-parallel shards, in the dtype of training."""
    wrong = []
    for stored in (stored for bucket in assembly.zero.buckets for stored in bucket.stored):
        flat = stored.parameter.detach().reshape(-1)
        for block in stored.blocks:
            wanted = _wanted(f"master/{block.name}", block.global_shape, block.box).bfloat16()
            if not torch.equal(flat[block.start : block.stop].view(block.box.shape), wanted):
                wrong.append(f"parameter {block.name}")
    return wrong


def _num_bytes(path: Path) -> int:
    return sum(file.num_bytes for file in read_manifest(path).files.values())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each layout."""
    folder = tmp_path_factory.mktemp("matrix")
    for layout in LAYOUTS:
        run_ranks(_save, layout.world_size, folder, layout)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_any_training_layout_loads_into_any_other(root: Path, layout: Layout) -> None:
    told = run_ranks(_load_all, layout.world_size, root, layout, LAYOUTS)
    assert [what for wrong, _ in told for what in wrong] == []
    for number, source in enumerate(LAYOUTS):
        read = sum(num_bytes[number] for _, num_bytes in told)
        assert read == _num_bytes(root / source.name / "step-00000003"), source.name


def test_the_digests_of_a_state_are_the_same_in_every_layout_of_a_sample(tmp_path: Path) -> None:
    digests = []
    for layout in (LAYOUTS[0], LAYOUTS[2], LAYOUTS[6]):
        run_ranks(_save, layout.world_size, tmp_path, layout)
        digests.append(read_manifest(tmp_path / layout.name / "step-00000003").digests)
    assert digests[0] == digests[1] == digests[2]
    assert set(digests[0]) == {"master", "exp_avg", "exp_avg_sq"}


def _restart(rank: int, world_size: int, root: Path, layout: Layout) -> Any:
    """Twice in a row, as after a roll-back: the plan is made once, so headers are read once."""
    assembly, path = _assemble(layout), root / layout.name / "step-00000003"
    pieces = state_pieces(assembly.zero, assembly.optimizer, "all")
    plans, read = PlanCache(), []
    for _ in range(2):
        storage = CountingFolder(path.parent)
        with mock.patch.object(load, "opened", return_value=(storage, path.name)):
            load_checkpoint(path, pieces, group=_group(layout), plans=plans)
        read.append(storage.num_bytes)
        assert _different(pieces) == []
    return read


def test_a_restart_of_four_data_ranks_reads_each_byte_once(tmp_path: Path) -> None:
    layout = Layout(1, 1, 1, 4, 1)
    run_ranks(_save, 4, tmp_path, layout)
    told = run_ranks(_restart, 4, tmp_path, layout)
    manifest = read_manifest(tmp_path / layout.name / "step-00000003")
    files = [manifest.files[name] for name in sorted(manifest.files)]
    assert [first for first, _ in told] == [file.num_bytes for file in files]
    assert [again for _, again in told] == [file.num_bytes - file.header_bytes for file in files]
