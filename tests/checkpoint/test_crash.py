"""Killed at any point of a save, or damaged afterwards: skipped with a message, never loaded."""

from __future__ import annotations

import hashlib
import json
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
from megascale.checkpoint.load import load_newest
from megascale.checkpoint.manifest import OtherFormatError
from megascale.errors import CheckpointError
from tests.checkpoint.layouts import empty, reference, rows, whole
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


# A listing is for reading; what is done by a descriptor (writes, syncs) is met by `kills/`.
_TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir")


def _die_before_file_operation(number: int, root: Path) -> None:
    """Kill this process where it is about to touch the file system under `root` the n-th time."""
    touched = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal touched
        if event in _TOUCHES and str(root) in str(args[0]):
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
    # mkdir, data, listings, manifest, mark, and the syncs of folders: at the very end only the last
    # of those is left, the mark is in place and the new checkpoint counts.
    assert len(killed) > 12
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


def _flip_a_byte(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


DATA = "rank-00000.safetensors"


def _rewrite_format(path: Path, wanted: int) -> None:
    """What a megascale of another format would have committed."""
    manifest = (
        (path / "manifest.json").read_bytes().replace(b'"format": 2', b'"format": %d' % wanted)
    )
    (path / "manifest.json").write_bytes(manifest)
    mark = json.loads((path / "COMMITTED").read_bytes())
    mark["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    (path / "COMMITTED").write_text(json.dumps(mark))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "mark missing": (lambda p: (p / "COMMITTED").unlink(), "COMMITTED is missing or damaged"),
    "mark damaged": (
        lambda p: (p / "COMMITTED").write_text("{"),
        "COMMITTED is missing or damaged",
    ),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest changed": (lambda p: _flip_a_byte(p / "manifest.json"), "manifest.json was changed"),
    "data truncated": (lambda p: os.truncate(p / DATA, 900), f"{DATA} has 900 bytes"),
    "data flipped": (
        lambda p: _flip_a_byte(p / DATA, -1),
        rf"{DATA}: bytes 4,096 to 5,296 have SHA-256",
    ),
    "header flipped": (lambda p: _flip_a_byte(p / DATA, 20), rf"{DATA}: bytes 0 to 4,096 have"),
    "data missing": (lambda p: (p / DATA).unlink(), f"{DATA} is missing"),
}
OTHER_FORMATS = {
    1: "checkpoint format 1 of an older megascale, this version reads 2; load it with",
    3: "checkpoint format 3 of a newer megascale, this version reads 2; update megascale",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    older, newer = _save(tmp_path, 1), _save(tmp_path, 2)
    inflict, message = DAMAGES[damage]
    inflict(newer)
    tensor = torch.zeros(300)
    loaded = load_newest(tmp_path, [whole("master/a", tensor)])
    assert loaded is not None
    assert (loaded.path, loaded.step) == (older, 1)
    assert torch.equal(tensor, torch.ones(300))
    assert message in caplog.text
    assert newer.name in caplog.text
    assert "interrupted" not in caplog.text
    with pytest.raises(CheckpointError):
        verify(newer)
    with pytest.raises(CheckpointError):
        load_checkpoint(newer, [whole("master/a", tensor)])


@pytest.mark.parametrize("number", OTHER_FORMATS)
def test_the_newest_of_another_format_is_refused_not_passed_over(
    tmp_path: Path, number: int
) -> None:
    _save(tmp_path, 1)
    _rewrite_format(_save(tmp_path, 2), number)
    tensor = torch.zeros(300)
    with pytest.raises(OtherFormatError, match=OTHER_FORMATS[number]):
        load_newest(tmp_path, [whole("master/a", tensor)])
    assert not tensor.any()


def test_nothing_is_ever_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save(tmp_path, 1)
    monkeypatch.setattr(pickle, "load", lambda *args: pytest.fail("unpickled"))
    monkeypatch.setattr(pickle, "Unpickler", lambda *args: pytest.fail("unpickled"))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("unpickled"))
    assert _loaded_step(path) == 1.0
    _flip_a_byte(path / DATA)
    with pytest.raises(CheckpointError, match="SHA-256"):
        load_checkpoint(path, [whole("master/a", torch.zeros(300))])


def _load_with_damage(rank: int, world_size: int, root: str) -> tuple[str, bool]:
    wanted = rows(rank, world_size, reference())
    for step in (1, 2):
        save_checkpoint(Path(root), step, wanted, {}, group=dist.group.WORLD)
    if rank == 0:  # one block, which one rank reads: the others hear of it by agreement
        _flip_a_byte(Path(root) / "step-00000002" / "rank-00002.safetensors", -1)
    dist.barrier()
    pieces = rows(rank, world_size, empty())
    loaded = load_newest(Path(root), pieces, group=dist.group.WORLD)
    assert loaded is not None
    same = all(torch.equal(a.tensor, b.tensor) for a, b in zip(pieces, wanted, strict=True))
    return str(loaded.path), same


def test_all_ranks_agree_on_what_is_loaded(tmp_path: Path) -> None:
    wanted = (str(tmp_path / "step-00000001"), True)
    assert run_ranks(_load_with_damage, 4, str(tmp_path)) == [wanted] * 4


def test_the_latest_is_the_last_committed_not_the_highest_step(tmp_path: Path) -> None:
    _save(tmp_path, 300)
    after_roll_back = _save(tmp_path, 110)
    assert find_latest(tmp_path) == after_roll_back


def test_nothing_to_find(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None
    (tmp_path / "step-00000001.txt").write_text("not a checkpoint")
    assert find_latest(tmp_path) is None
