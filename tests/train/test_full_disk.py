"""A full disk costs what could not be written: never training, never an older checkpoint.

Only the last checkpoint is one that a run must have: without it the exit code is 4.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale.checkpoint import verify
from megascale.train import loop
from megascale.train.step import train_step
from tests.train.command import num_lines, train_here
from tests.train.runs import checkpoints, metrics

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


SAVES = ["training.steps=6", "checkpoint.interval=2", "checkpoint.keep_latest_k=9"]
_Usage = namedtuple("_Usage", "total used free")


def _assert_only_the_first_was_saved(run: Path, text: str, errors: str) -> None:
    assert "step 4 was not saved, training goes on" in text
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert checkpoints(run) == ["step-00000002"]
    verify(run / "checkpoints" / "step-00000002")
    assert errors.count("error:") == 1
    assert "older checkpoints are untouched" in errors


def test_no_space_foreseen(
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run, free = tmp_path / "run", iter([1 << 40])
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: _Usage(0, 0, next(free, 1000)))
    assert train_here(monkeypatch, run, *SAVES) == 4
    _assert_only_the_first_was_saved(run, caplog.text, capsys.readouterr().err)
    monkeypatch.undo()
    assert train_here(monkeypatch, run, *SAVES, more=("--resume",)) == 0  # from step 2
    assert checkpoints(run) == [f"step-{step:08d}" for step in (2, 4, 6)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """800 KiB, which hold one checkpoint of 460."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=800k tmpfs '{disk}'"
    if subprocess.run(mount, shell=True, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_disk_full_in_the_middle_of_a_save(
    small_disk: Path,
    monkeypatch: Patch,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = small_disk / "run"
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: _Usage(0, 0, 1 << 40))
    assert train_here(monkeypatch, run, *SAVES) == 4
    _assert_only_the_first_was_saved(run, caplog.text, capsys.readouterr().err)


def _fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "ballast").open("wb") as file:
        file.write(bytes(2 << 20))


def test_a_start_on_a_full_disk_leaves_the_run_as_it_was(
    small_disk: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    run = small_disk / "run"
    assert train_here(monkeypatch, run) == 0
    before = {name: (run / name).read_text() for name in ("config.json", "run.json")}
    _fill(small_disk)
    assert train_here(monkeypatch, run, "training.steps=4", more=["--resume"]) == 4
    assert f"the run folder {run} cannot be written: [Errno 28]" in capsys.readouterr().err
    assert {name: (run / name).read_text() for name in before} == before
    (small_disk / "ballast").unlink()
    more = ["training.steps=3", "checkpoint.enable=false"]
    assert train_here(monkeypatch, run, *more, more=["--resume"]) == 0
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]


def test_a_disk_that_others_filled_costs_metrics_only(
    small_disk: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    run = small_disk / "run"

    def fill_then_step(*arguments: Any, **options: Any) -> Any:
        if num_lines(run / "metrics.jsonl") == 2:
            _fill(small_disk)
        return train_step(*arguments, **options)

    monkeypatch.setattr(loop, "train_step", fill_then_step)
    settings = ["training.steps=30", "checkpoint.enable=false"]  # more lines than a page holds
    assert train_here(monkeypatch, run, *settings) == 0
    assert "metrics of step 30 were not written: [Errno 28] No space left" in caplog.text
    assert 2 <= num_lines(run / "metrics.jsonl") < 30
