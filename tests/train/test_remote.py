"""The remote tier: a copy is a whole checkpoint, and a run whose disk is lost goes on from it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import verify
from megascale.checkpoint.manifest import list_checkpoints
from megascale.errors import StorageError
from megascale.storage import FileWriter
from megascale.train.loop import Loop
from tests.shared import shared_folder
from tests.train.command import num_lines, train_here
from tests.train.runs import (
    SINGLE,
    Layout,
    assert_same_bits,
    checkpoints,
    curve,
    metrics,
    train,
)
from tests.train.test_behind import SMALL, incidents

DP2: Layout = {"tp": 1, "dp": 2, "pp": 1}
Patch = pytest.MonkeyPatch


def to(remote: Path, *more: str) -> list[str]:
    return [*SMALL, f'checkpoint.remote="{remote}"', "checkpoint.remote_keep_latest_k=99", *more]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks, with disk and remote."""

    def make(folder: Path) -> None:
        assert not any(train(folder / "run", DP2, to(folder / "remote")))

    return shared_folder(tmp_path_factory, "remote-whole", make)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _committed(remote: Path) -> list[str]:
    return sorted(path.name for path in list_checkpoints(remote).committed)


def test_a_copy_is_its_original_mark_and_number_too(whole: Path) -> None:
    run, remote = whole / "run", whole / "remote"
    assert _committed(remote)[-1] == checkpoints(run)[-1] == "step-00000008"
    for name in _committed(remote):
        verify(remote / name)
        assert _files(remote / name) == _files(run / "checkpoints" / name)
    told = incidents(run, "checkpoint_copied")
    assert [f"step-{event.step:08d}" for event in told] == _committed(remote)
    assert all(event.detail["seconds"] > 0 for event in told)


def _numbers(root: Path) -> dict[str, int]:
    marks = {mark.parent.name: json.loads(mark.read_text()) for mark in root.glob("*/COMMITTED")}
    return {name: int(mark["number"]) for name, mark in marks.items()}


def _kill(run: Path, remote: Path, layout: Layout, after: int, *options: str) -> None:
    train(run, layout, to(remote, *options), kill_after=after, plant=_AllCopied(after))


@dataclass(frozen=True)
class _AllCopied:
    """Before `step` everything under way has ended."""

    step: int

    def __call__(self, rank_loop: Loop) -> None:
        keep = rank_loop.persistence.keep

        def first(progress: Any, **options: Any) -> None:
            if progress.step == self.step - 1:
                rank_loop.persistence.finish()
            keep(progress, **options)

        rank_loop.persistence.keep = first  # type: ignore[method-assign]


@pytest.mark.parametrize("then", [DP2, pytest.param(SINGLE, marks=pytest.mark.full)])
def test_a_run_whose_disk_is_lost_goes_on_from_the_remote(
    whole: Path, tmp_path: Path, then: Layout
) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    _kill(run, remote, DP2, 6)
    assert checkpoints(run) == ["step-00000002", "step-00000004"]
    shutil.rmtree(run / "checkpoints")
    before = len(metrics(run))
    assert not any(train(run, then, to(remote), resume=True))
    assert metrics(run)[before]["step"] == 5
    assert checkpoints(run) == ["step-00000006", "step-00000008"]
    if then is DP2:
        assert curve(run) == curve(whole / "run")
        assert_same_bits(run, whole / "run")
    # what was saved since is newer than what came from the remote, at both places
    assert list_checkpoints(remote).committed[0].name == "step-00000008"
    assert _numbers(run / "checkpoints") == {"step-00000006": 3, "step-00000008": 4}
    again = [*to(remote), "training.steps=10"]
    assert not any(train(run, then, again, resume=True))
    assert metrics(run)[-1]["step"] == 10
    assert [line["step"] for line in metrics(run)[-2:]] == [9, 10]


def test_a_damaged_checkpoint_is_made_up_for_by_its_copy(whole: Path, tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    _kill(run, remote, DP2, 6)
    shard = run / "checkpoints" / "step-00000004" / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    before = len(metrics(run))
    assert not any(train(run, DP2, to(remote), resume=True))
    assert metrics(run)[before]["step"] == 5
    assert_same_bits(run, whole / "run")


def test_what_was_taken_away_does_not_come_back_from_the_remote(tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    _kill(run, remote, SINGLE, 6)
    newest = run / "checkpoints" / "step-00000004"
    newest.rename(newest.with_name("aside-step-00000004"))
    before = len(metrics(run))
    assert train(run, SINGLE, to(remote), resume=True) == [None]
    assert metrics(run)[before]["step"] == 3
    # the copy of the new step 4 has a name of its own, and is the newer of the two
    numbers = _numbers(remote)
    names = ["step-00000002", "step-00000004", "step-00000004.1", "step-00000006", "step-00000008"]
    assert numbers == dict(zip(names, range(1, 6), strict=True))


@dataclass(frozen=True)
class SlowCopies:
    """A file takes so much longer to copy; the copy of `killed_in` ends the rank."""

    seconds: float
    killed_in: int = 0

    def __call__(self, _rank_loop: Loop) -> None:
        copy = FileWriter.copy_file

        def slow(writer: FileWriter, source: str, *arguments: Any, **options: Any) -> Any:
            if f"step-{self.killed_in:08d}" in source and os.environ["RANK"] == "0":
                kill = (os.getpid(), signal.SIGKILL)
                threading.Timer(self.seconds / 2, os.kill, kill).start()
            time.sleep(self.seconds)
            return copy(writer, source, *arguments, **options)

        FileWriter.copy_file = slow  # type: ignore[method-assign,assignment]


def test_one_copy_at_a_time_the_newest_waits_and_nothing_copied_is_deleted(tmp_path: Path) -> None:
    """Eight checkpoints in the time of a copy or two: of those that wait the newest is copied."""
    run, remote = tmp_path / "run", tmp_path / "remote"
    options = to(remote, "checkpoint.interval=1", "checkpoint.keep_latest_k=1")
    assert train(run, SINGLE, options, plant=SlowCopies(1.0)) == [None]
    copies = _committed(remote)
    assert (copies[0], copies[-1]) == ("step-00000001", "step-00000008")
    assert len(copies) <= 4
    for name in _committed(remote):
        verify(remote / name)
    assert checkpoints(run) == ["step-00000008"]


def test_killed_while_it_is_copied_a_copy_has_no_mark(whole: Path, tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    with pytest.raises(AssertionError, match=r"died without a word|failed:"):
        train(run, DP2, [*to(remote), "training.steps=4000"], plant=SlowCopies(0.3, killed_in=2))
    assert _committed(remote) == []
    shutil.rmtree(run / "checkpoints")  # nothing is left but half a copy
    (run / "last_checkpoint.json").unlink()
    (run / "metrics.jsonl").unlink()
    assert not any(train(run, DP2, to(remote), resume=True))
    assert metrics(run)[0]["step"] == 1
    assert "step-00000008" in _committed(remote)
    assert_same_bits(run, whole / "run")


@dataclass(frozen=True)
class _Refused:
    """The remote takes nothing of step 4."""

    def __call__(self, _rank_loop: Loop) -> None:
        copy = FileWriter.copy_file

        def refuse(writer: FileWriter, source: str, *arguments: Any, **options: Any) -> Any:
            if "step-00000004" in source:
                raise StorageError("s3://bucket refuses the credentials")
            return copy(writer, source, *arguments, **options)

        FileWriter.copy_file = refuse  # type: ignore[method-assign,assignment]


def test_a_copy_that_fails_is_told_and_training_goes_on(tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    options = to(remote, "checkpoint.interval=4")
    assert train(run, DP2, options, plant=_Refused()) == [None] * 2
    assert checkpoints(run) == ["step-00000004", "step-00000008"]
    assert _committed(remote) == ["step-00000008"]
    (failed,) = incidents(run, "checkpoint_copy_failed")
    assert failed.step == 4
    assert "refuses the credentials" in failed.detail["reason"]


def test_only_some_checkpoints_go_there_and_the_last_one_always(tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    options = to(remote, "checkpoint.remote_interval=4", "training.steps=6")
    assert train(run, SINGLE, options) == [None]
    assert _committed(remote) == ["step-00000004", "step-00000006"]


def test_old_copies_go(tmp_path: Path) -> None:
    run, remote = tmp_path / "run", tmp_path / "remote"
    options = [*to(remote), "checkpoint.remote_keep_latest_k=2", "checkpoint.keep_latest_k=1"]
    errors = train(run, SINGLE, options, plant=_Joined())
    assert errors == [None]
    assert _committed(remote) == ["step-00000006", "step-00000008"]
    assert checkpoints(run) == ["step-00000008"]


@dataclass(frozen=True)
class _Joined:
    """Each copy is made before the next step."""

    def __call__(self, rank_loop: Loop) -> None:
        keep = rank_loop.persistence.keep

        def then_wait(progress: Any, **options: Any) -> None:
            keep(progress, **options)
            rank_loop.persistence.finish()

        rank_loop.persistence.keep = then_wait  # type: ignore[method-assign]


# ---------------------------------------------------------------- bad input


def test_a_new_run_beside_the_copies_of_another_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = f'checkpoint.remote="{whole / "remote"}"'
    assert train_here(monkeypatch, tmp_path / "run", remote) == 4
    told = capsys.readouterr().err
    assert "holds 4 checkpoint(s) already, and this is a new run" in told
    assert "name a place of its own" in told


def test_resuming_with_the_remote_of_another_run_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have the same model, data and seed: nothing else tells them apart."""
    run, own = tmp_path / "run", tmp_path / "own"
    assert train_here(monkeypatch, run, f'checkpoint.remote="{own}"') == 0
    assert _committed(own) == ["step-00000002"]
    settings = [f'checkpoint.remote="{whole / "remote"}"', "training.steps=3"]
    assert train_here(monkeypatch, run, *settings, more=["--resume"]) == 4
    assert "holds the checkpoints of another run" in capsys.readouterr().err
    settings = [f'checkpoint.remote="{tmp_path / "new"}"', "training.steps=3"]
    assert train_here(monkeypatch, run, *settings, more=["--resume"]) == 0
    assert _committed(tmp_path / "new") == ["step-00000003"]


@pytest.mark.parametrize("remote", ["s33://bucket/run", "/proc/nothing/here"])
def test_a_remote_that_cannot_be_is_refused_before_anything_is_trained(
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: pytest.CaptureFixture[str],
    remote: str,
) -> None:
    run = tmp_path / "run"
    assert train_here(monkeypatch, run, f'checkpoint.remote="{remote}"') in (2, 4)
    assert remote.split("/", 1)[0] in capsys.readouterr().err
    assert num_lines(run / "metrics.jsonl") == 0
    assert not (run / "config.json").exists()  # the folder can be used
