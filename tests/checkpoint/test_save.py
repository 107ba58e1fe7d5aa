"""Saving: one writer, fresh directories, and failures that every rank hears of and none suffers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import find_latest, manifest, read_meta, save_checkpoint, verify
from megascale.checkpoint.pieces import Piece
from megascale.errors import CheckpointError
from megascale.shards import Box
from tests.checkpoint.layouts import reference, replicated, rows, whole
from tests.distributed import run_ranks


def _save_one(root: Path, step: int = 1, numel: int = 100) -> Path:
    return save_checkpoint(root, step, [whole("master/a", torch.randn(numel))], {})


def test_a_committed_directory_holds_what_its_manifest_says_and_nothing_else(
    tmp_path: Path,
) -> None:
    meta = {"model": {"hidden": 8}, "consumed_samples": 96, "seed": 1}
    path = save_checkpoint(tmp_path, 12, rows(0, 1, reference()), meta)
    assert path == tmp_path / "step-00000012"
    listed = json.loads((path / "manifest.json").read_bytes())
    names = {file.name for file in path.iterdir()}
    assert names == {*listed["files"], "manifest.json", "COMMITTED"}
    assert ".metadata" in listed["files"]
    assert read_meta(path) == {**meta, "step": 12}
    verify(path)


def test_a_save_tells_what_it_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "HASHED_BYTES", 1000)
    moved: list[None] = []
    pieces = [whole(f"master/{name}", torch.randn(1000)) for name in "abc"]
    path = save_checkpoint(tmp_path, 1, pieces, {}, moved=lambda: moved.append(None))
    files = [path / name for name in ("__0_0.distcp", ".metadata")]
    blocks = sum(-(-file.stat().st_size // 1000) for file in files)
    assert len(moved) == 1 + len(pieces) + blocks, "the beginning, tensors, hashed blocks"
    verify(path)


def test_a_step_saved_again_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    paths = [_save_one(tmp_path) for _ in range(3)]
    assert [path.name for path in paths] == ["step-00000001", "step-00000001.1", "step-00000001.2"]
    assert find_latest(tmp_path) == paths[2]


def test_an_unmarked_leftover_is_not_reused(tmp_path: Path) -> None:
    leftover = tmp_path / "step-00000001"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert _save_one(tmp_path).name == "step-00000001.1"
    assert (leftover / "__0_0.distcp").read_bytes() == b"half"


def test_meta_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path / "root", 1, [], {"model": torch.zeros(1)})
    assert not (tmp_path / "root").exists()


def _record_marks(rank: int, world_size: int, root: str) -> list[str]:
    written: list[str] = []
    replace = os.replace

    def recording(source: Any, target: Any) -> None:
        written.append(Path(target).name)
        replace(source, target)

    pieces = rows(rank, world_size, reference())
    with mock.patch.object(os, "replace", recording):
        save_checkpoint(Path(root), 1, pieces, {"rank": rank}, group=dist.group.WORLD)
    return written


def test_one_writer_commits_and_the_mark_is_last(tmp_path: Path) -> None:
    first, *others = run_ranks(_record_marks, 4, str(tmp_path))
    assert first == ["manifest.json", "COMMITTED"]
    assert others == [[], [], []]
    assert read_meta(tmp_path / "step-00000001") == {"rank": 0, "step": 1}


def _save_and_report(rank: int, world_size: int, root: str, fault: str) -> str:
    layouts = {"replicated": replicated, "dtype": _mixed}
    pieces = layouts.get(fault, rows)(rank, world_size, reference())
    full_disk = OSError(errno.ENOSPC, "No space left on device")
    broken = rank == 1 and fault == "disk full"
    with mock.patch("os.fsync", side_effect=full_disk) if broken else contextlib.nullcontext():
        message = _refused(root, pieces)
    pieces = rows(rank, world_size, reference())
    save_checkpoint(Path(root), 3, pieces, {}, group=dist.group.WORLD)  # training goes on
    return message


def _refused(root: str, pieces: list[Piece]) -> str:
    with pytest.raises(CheckpointError) as refusal:
        save_checkpoint(Path(root), 2, pieces, {}, group=dist.group.WORLD)
    return str(refusal.value)


def _mixed(rank: int, world_size: int, tensors: dict[str, torch.Tensor]) -> list[Piece]:
    dtype = torch.float32 if rank else torch.bfloat16
    return [Piece("master/a", (8,), Box((4 * rank,), (4,)), torch.zeros(4, dtype=dtype))]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("disk full", "rank 1 of 2: the disk is full; free space"),
        ("replicated", "master/layers.0.attn.q.weight: .* are both written"),
        ("dtype", "master/a: ranks disagree, .*bfloat16.*float32"),
    ],
)
def test_a_fault_of_one_rank_reaches_all_and_the_next_save_works(
    tmp_path: Path, fault: str, message: str
) -> None:
    before = _save_one(tmp_path)
    content = {file.name: file.read_bytes() for file in before.iterdir()}
    first, second = run_ranks(_save_and_report, 2, str(tmp_path), fault)
    assert first == second
    assert re.search(message, first), first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    assert content == {file.name: file.read_bytes() for file in before.iterdir()}


def test_an_element_that_nobody_writes_is_refused(tmp_path: Path) -> None:
    half = Piece("master/a", (8, 2), Box((4, 0), (4, 2)), torch.zeros(4, 2))
    with pytest.raises(CheckpointError, match=r"master/a: .* write 8 elements, .* has 16"):
        save_checkpoint(tmp_path, 1, [half], {})
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=2000))
    with pytest.raises(CheckpointError, match=r"needs about 2,448 bytes, .* has 2,000 free"):
        _save_one(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_while_writing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _save_one(small_disk)
    # Others write too: the space that was free at the check is gone at the write.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=10**9))
    with pytest.raises(CheckpointError, match="the disk is full"):
        _save_one(small_disk, step=2, numel=400_000)
    assert [path.name for path in small_disk.iterdir()] == [before.name]
    after = _save_one(small_disk, step=3)
    assert find_latest(small_disk) == after
