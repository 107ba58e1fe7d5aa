"""Killed at any point of a save, or damaged afterwards: skipped with a message, never loaded."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megascale.checkpoint import find_latest, load_checkpoint, save_checkpoint, verify
from megascale.errors import CheckpointError
from tests.checkpoint.layouts import reference, rows, whole
from tests.distributed import run_ranks

KILLED = 9


def _save(root: Path, step: int) -> Path:
    tensor = torch.full((300,), float(step))
    return save_checkpoint(root, step, [whole("master/a", tensor)], {})


def _loaded_step(path: Path) -> float:
    tensor = torch.zeros(300)
    load_checkpoint(path, [whole("master/a", tensor)])
    assert (tensor == tensor[0]).all()
    return tensor[0].item()


def _die_before_file_operation(number: int, root: Path) -> None:
    """Kill this process where it is about to touch the file system under `root` the n-th time."""
    touched = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal touched
        if event in ("open", "os.mkdir", "os.rename", "os.remove") and str(root) in str(args[0]):
            touched += 1
            if touched == number:
                os._exit(KILLED)

    sys.addaudithook(hook)


def _kill_a_save_everywhere(rank: int, world_size: int, folder: str) -> list[tuple[str, float]]:
    """What is found, and what it holds, after a kill before the 1st, 2nd, ... file operation."""
    found = []
    for number in range(1, 100):
        root = Path(folder) / str(number)
        _save(root, 1)
        child = os.fork()
        if child == 0:
            _die_before_file_operation(number, root)
            _save(root, 2)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        latest = find_latest(root)
        assert latest is not None
        found.append((latest.name, _loaded_step(latest)))
        if status == 0:
            return found
        assert status == KILLED, status
        assert _loaded_step(_save(root, 3)) == 3.0
    raise AssertionError("the save never ended")


@pytest.mark.full
def test_killed_before_any_file_operation_the_older_checkpoint_is_found(tmp_path: Path) -> None:
    *killed, ended = run_ranks(_kill_a_save_everywhere, 1, str(tmp_path))[0]
    # mkdir, data, metadata, hashes, manifest, mark, and their syncs: at the very end only the
    # folder's sync is left, the mark is in place and the new checkpoint counts.
    assert len(killed) > 15
    assert set(killed[:-1]) == {("step-00000001", 1.0)}
    assert killed[-1] == ended == ("step-00000002", 2.0)


def _die_in_rank_1(rank: int, world_size: int, root: str) -> None:
    if rank == 1:
        mock.patch("os.fsync", side_effect=lambda descriptor: os._exit(KILLED)).start()
    save_checkpoint(Path(root), 2, rows(rank, 2, reference()), {}, group=dist.group.WORLD)


def test_a_rank_that_dies_while_others_write_leaves_no_mark(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = _save(tmp_path, 1)
    with pytest.raises(AssertionError, match=r"died without a word|failed"):
        run_ranks(_die_in_rank_1, 2, str(tmp_path))
    assert (tmp_path / "step-00000002").is_dir()
    assert find_latest(tmp_path) == older
    assert "step-00000002: no commit mark, its save was interrupted" in caplog.text


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "mark missing": (lambda p: (p / "COMMITTED").unlink(), "COMMITTED is missing or damaged"),
    "mark damaged": (
        lambda p: (p / "COMMITTED").write_text("{"),
        "COMMITTED is missing or damaged",
    ),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest changed": (lambda p: _flip_a_byte(p / "manifest.json"), "manifest.json was changed"),
    "data truncated": (
        lambda p: os.truncate(p / "__0_0.distcp", 900),
        "__0_0.distcp has 900 bytes",
    ),
    "data flipped": (lambda p: _flip_a_byte(p / "__0_0.distcp"), "__0_0.distcp has SHA-256"),
    "data missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "metadata flipped": (lambda p: _flip_a_byte(p / ".metadata"), ".metadata has SHA-256"),
    "metadata missing": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    older, newer = _save(tmp_path, 1), _save(tmp_path, 2)
    inflict, message = DAMAGES[damage]
    inflict(newer)
    assert find_latest(tmp_path) == older
    assert message in caplog.text
    assert newer.name in caplog.text
    assert "interrupted" not in caplog.text
    with pytest.raises(CheckpointError):
        verify(newer)
    assert _loaded_step(older) == 1.0


def test_nothing_is_unpickled_before_the_hashes_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _save(tmp_path, 1)
    _flip_a_byte(path / "__0_0.distcp")
    monkeypatch.setattr(pickle, "load", lambda *args: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_checkpoint(path, [whole("master/a", torch.zeros(300))])


def _find_with_damage(rank: int, world_size: int, root: str) -> str:
    for step in (1, 2):
        pieces = rows(rank, world_size, reference())
        save_checkpoint(Path(root), step, pieces, {}, group=dist.group.WORLD)
    if rank == 0:  # rank 0 hashes the larger half of the files, so others hear of it by agreement
        _flip_a_byte(Path(root) / "step-00000002" / "__2_0.distcp")
    dist.barrier()
    return str(find_latest(Path(root), group=dist.group.WORLD))


def test_all_ranks_agree_on_the_latest(tmp_path: Path) -> None:
    assert run_ranks(_find_with_damage, 4, str(tmp_path)) == [str(tmp_path / "step-00000001")] * 4


def test_the_latest_is_the_last_committed_not_the_highest_step(tmp_path: Path) -> None:
    _save(tmp_path, 300)
    after_roll_back = _save(tmp_path, 110)
    assert find_latest(tmp_path) == after_roll_back


def test_nothing_to_find(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None
    (tmp_path / "step-00000001.txt").write_text("not a checkpoint")
    assert find_latest(tmp_path) is None
