"""Saving: one writer, fresh directories, and failures that every rank hears of and none suffers."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open

from megascale.checkpoint import find_latest, read_meta, save_checkpoint, tiling, verify
from megascale.checkpoint.manifest import read_manifest
from megascale.checkpoint.pieces import Piece
from megascale.errors import CheckpointError
from megascale.shards import Box
from megascale.storage import BLOCK_BYTES, LocalFolder, direct
from tests.checkpoint.layouts import at_rank_0, columns, reference, replicated, rows, whole
from tests.checkpoint.storages import Recording, Slow, Vanishing
from tests.distributed import run_ranks


def _save_one(root: Path, step: int = 1, numel: int = 100) -> Path:
    return save_checkpoint(root, step, [whole("master/a", torch.randn(numel))], {})


def test_a_committed_folder_holds_what_its_manifest_says_and_nothing_else(tmp_path: Path) -> None:
    meta = {"model": {"hidden": 8}, "consumed_samples": 96, "seed": 1}
    path = save_checkpoint(tmp_path, 12, rows(0, 1, reference()), meta)
    assert path == tmp_path / "step-00000012"
    listed = json.loads((path / "manifest.json").read_bytes())
    assert list(listed["files"]) == ["rank-00000.safetensors"]
    names = {file.name for file in path.iterdir()}
    assert names == {*listed["files"], "manifest.json", "COMMITTED"}
    assert read_meta(path) == {**meta, "step": 12}
    verify(path)


def test_a_file_is_what_the_safetensors_library_reads_and_the_hashes_are_of_its_blocks(
    tmp_path: Path,
) -> None:
    tensor = torch.randn(5, 1 << 20)  # 20 MiB: two blocks
    pieces = [whole("count/steps", torch.tensor(7)), whole("master/a", tensor.t())]
    path = save_checkpoint(tmp_path, 1, pieces, {}) / "rank-00000.safetensors"
    with safe_open(path, "pt") as file:
        assert file.get_tensor("count/steps@") == 7
        assert torch.equal(file.get_tensor("master/a@0,0"), tensor.t())
    saved = read_manifest(path.parent).files[path.name]
    data = path.read_bytes()
    values = data[saved.header_bytes :]
    assert len(data) == saved.num_bytes == saved.header_bytes + 8 + tensor.nbytes
    assert saved.header_sha256 == hashlib.sha256(data[: saved.header_bytes]).hexdigest()
    assert saved.blocks == (
        hashlib.sha256(values[:BLOCK_BYTES]).hexdigest(),
        hashlib.sha256(values[BLOCK_BYTES:]).hexdigest(),
    )


def test_a_rank_without_values_writes_no_file(tmp_path: Path) -> None:
    path = Path(run_ranks(_save_at_rank_0, 2, str(tmp_path))[1])
    assert [file.name for file in sorted(path.iterdir())] == [
        "COMMITTED",
        "manifest.json",
        "rank-00000.safetensors",
    ]
    verify(path)


def _save_at_rank_0(rank: int, world_size: int, root: str) -> str:
    pieces = at_rank_0(rank, world_size, reference())
    return str(save_checkpoint(Path(root), 1, pieces, {}, group=dist.group.WORLD))


def test_a_save_tells_what_it_moves(tmp_path: Path) -> None:
    moved: list[None] = []
    pieces = [whole(f"master/{name}", torch.zeros(3 << 20)) for name in "abc"]  # 36 MiB
    save_checkpoint(tmp_path, 1, pieces, {}, moved=lambda: moved.append(None))
    assert len(moved) >= 1 + 3, "the beginning, and each block"


def test_a_step_saved_again_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    paths = [_save_one(tmp_path) for _ in range(3)]
    assert [path.name for path in paths] == ["step-00000001", "step-00000001.1", "step-00000001.2"]
    assert find_latest(tmp_path) == paths[2]


def test_an_unmarked_leftover_is_not_reused(tmp_path: Path) -> None:
    leftover = tmp_path / "step-00000001"
    leftover.mkdir()
    (leftover / "rank-00000.safetensors").write_bytes(b"half")
    assert _save_one(tmp_path).name == "step-00000001.1"
    assert (leftover / "rank-00000.safetensors").read_bytes() == b"half"


def test_meta_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path / "root", 1, [], {"model": torch.zeros(1)})
    assert not (tmp_path / "root").exists()


def _record_writes(rank: int, world_size: int, root: str) -> list[str]:
    storage = Recording(Path(root))
    pieces = rows(rank, world_size, reference())
    save_checkpoint(storage, 1, pieces, {"rank": rank}, group=dist.group.WORLD)
    return [name.removeprefix("step-00000001/") for name in storage.written]


def test_one_writer_commits_and_the_mark_is_last(tmp_path: Path) -> None:
    first, *others = run_ranks(_record_writes, 4, str(tmp_path))
    assert first == ["rank-00000.safetensors", "manifest.json", "COMMITTED"]
    assert others == [[f"rank-0000{rank}.safetensors"] for rank in (1, 2, 3)]
    assert read_meta(tmp_path / "step-00000001") == {"rank": 0, "step": 1}


def _count_plans(rank: int, world_size: int, root: str) -> list[int]:
    """How often entries were checked after saves of one layout, another, and the first again."""
    num_checked = []
    with mock.patch.object(tiling, "check_tiled", wraps=tiling.check_tiled) as check:
        for layout in (rows, rows, columns, columns, rows):
            pieces = layout(rank, world_size, reference())
            save_checkpoint(Path(root), 1, pieces, {}, group=dist.group.WORLD)
            num_checked.append(check.call_count)
    return num_checked


def test_entries_are_sent_and_checked_only_when_the_layout_changes(tmp_path: Path) -> None:
    assert run_ranks(_count_plans, 2, str(tmp_path)) == [[1, 1, 2, 2, 3], [0] * 5]


def _change_one_rank(rank: int, world_size: int, root: str) -> str:
    save_checkpoint(Path(root), 1, rows(rank, 2, reference()), {}, group=dist.group.WORLD)
    layout = replicated if rank else rows
    return _refused(root, layout(rank, world_size, reference()))


def test_one_rank_that_writes_something_else_is_seen(tmp_path: Path) -> None:
    for message in run_ranks(_change_one_rank, 2, str(tmp_path)):
        assert "are both written" in message


def _save_and_report(rank: int, world_size: int, root: str, fault: str) -> str:
    layouts = {"replicated": replicated, "dtype": _mixed, "odd dtype": _odd}
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


def _odd(rank: int, world_size: int, tensors: dict[str, torch.Tensor]) -> list[Piece]:
    return [whole("count/a", torch.zeros(2, dtype=torch.bool))] if rank else []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("disk full", "rank 1 of 2: .*the disk is full .*free space"),
        ("replicated", "exp_avg/layers.0.attn.o.weight: .* are both written"),
        ("odd dtype", "a tensor of torch.bool cannot be saved; use float64"),
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
    monkeypatch.setattr(shutil, "disk_usage", lambda path: mock.Mock(free=4400))
    with pytest.raises(CheckpointError, match=r"needs 4,496 bytes, .* has 4,400 free"):
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


def test_a_storage_that_vanishes_while_it_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = _save_one(tmp_path)
    storage = Vanishing(tmp_path)
    pieces = [whole("master/a", torch.randn(100))]
    with pytest.raises(CheckpointError, match=r"step-00000002/rank-00000.safetensors .*not there"):
        save_checkpoint(storage, 2, pieces, {})
    assert find_latest(tmp_path) == before, "what could not be removed has no mark"
    storage.is_back = True
    after = save_checkpoint(storage, 2, pieces, {})
    assert after == tmp_path / "step-00000002.1"
    assert find_latest(tmp_path) == after


def test_a_storage_that_stalls_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _save_one(tmp_path)
    asleep = threading.Event()
    write_at = direct.write_at
    monkeypatch.setattr(direct, "write_at", lambda *_: asleep.wait(30))
    storage = LocalFolder(tmp_path, stall_s=0.2)
    pieces = [whole("master/a", torch.randn(100))]
    with pytest.raises(CheckpointError, match=r"step-00000002/rank-00000.safetensors.*0\.2 s"):
        save_checkpoint(storage, 2, pieces, {})
    asleep.set()
    monkeypatch.setattr(direct, "write_at", write_at)
    assert find_latest(tmp_path) == before
    save_checkpoint(storage, 3, pieces, {})
    assert find_latest(tmp_path) == tmp_path / "step-00000003"


def test_a_storage_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    """No progress for `stall_s` is an error; a save that takes longer than that is none."""
    storage = Slow(tmp_path, block_s=0.15, stall_s=0.3)
    path = save_checkpoint(storage, 1, [whole("master/a", torch.randn(12 << 20))], {})
    assert path == tmp_path / "step-00000001"
    verify(path)
