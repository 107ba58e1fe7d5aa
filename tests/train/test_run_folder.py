"""Which folder a run goes on in, who may use it, and what is said of changes on resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megascale.train import start
from megascale.train.run_folder import RunFolder
from tests.train.command import run_here, train_here, tree
from tests.train.runs import metrics

Capture = pytest.CaptureFixture[str]
Logs = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on synthetic tokens; do not change it."""
    run = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        assert train_here(patch, run) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, as a user copies a run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


# ---------------------------------------------------------------- which folder


def test_a_copied_run_goes_on_where_it_is(run: Path, finished: Path, monkeypatch: Patch) -> None:
    before = tree(finished)
    monkeypatch.chdir(run.parent)
    assert run_here(monkeypatch, "train", "run", "--resume", "--set", "training.steps=3") == 0
    assert tree(finished) == before
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert RunFolder(run).load_config().job.run_dir == "run"


def test_local_ranks_are_told_the_folder(run: Path, monkeypatch: Patch) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(start, "launch_local", lambda arguments, *_: told.append(arguments))
    arguments = ("train", str(run), "--resume", "--nproc", "2")
    run_here(monkeypatch, *arguments)
    assert f'job.run_dir="{run}"' in told[0]


def test_an_explicit_folder_wins(
    run: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    other = tmp_path / "other"
    given = ("train", str(run), "--resume", "--set", f"job.run_dir={other}")
    assert run_here(monkeypatch, *given) == 4
    assert f"{other} holds no run" in capsys.readouterr().err
