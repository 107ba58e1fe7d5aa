"""Which folder a run goes on in, who may use it, and what is said of changes on resume."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from megascale.config import load_config
from megascale.env import RankEnvironment, hostname
from megascale.errors import ConfigError, LaunchError
from megascale.train import rank as rank_module
from megascale.train import run_folder, start
from megascale.train.run_folder import RunFolder
from tests.train.command import (
    SMALL,
    flags,
    num_lines,
    run_here,
    started,
    train_here,
    tree,
    wait_until,
    write_recipe,
)
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


# ---------------------------------------------------------------- who may use it


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_start_is_refused_while_one_trains(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, ranks: int
) -> None:
    run = tmp_path / "run"
    given = flags([*SMALL, "training.steps=100000", f"job.run_dir={run}"])
    again = flags([f"job.run_dir={run}", "training.steps=100001"])
    with started(["train", str(write_recipe(tmp_path)), *given]) as process:
        wait_until(lambda: num_lines(run / "metrics.jsonl") >= 1, process)
        start = ("train", str(run), "--resume", *again, "--nproc", str(ranks))
        assert run_here(monkeypatch, *start) == 2
        holder = f"{run} is in use: {hostname()} process {process.pid} trains there"
        assert holder in capsys.readouterr().err
        assert len(RunFolder(run).run_file.read_text().split('"command"')) == 2  # one start
        process.kill()
        process.wait()
    assert run_here(monkeypatch, "train", str(run), "--resume", *flags(["training.steps=1"])) == 0


def test_two_starts_at_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.hold(resume=False), pytest.raises(ConfigError, match="is in use"):
        folder.check(resume=False)
    folder.check(resume=False)  # released


def test_a_later_epoch_takes_the_folder_from_a_rank_that_stands_still(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A lost machine's rank 0 is alive perhaps, and holds the lock; the driver has given it up."""
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setenv("MEGASCALE_EPOCH", "3")
    with folder.hold(resume=False, epoch=3):
        for epoch in (0, 2, 3):
            with pytest.raises(ConfigError, match=r"is in use: .* process \d+, epoch 3 trains"):
                folder.hold(resume=False, epoch=epoch).__enter__()
        folder.check_epoch()
        with folder.hold(resume=False, epoch=4):
            with pytest.raises(LaunchError, match=r"belongs to epoch 4 now.* of epoch 3"):
                folder.check_epoch()
            with pytest.raises(ConfigError, match=r"epoch 4 trains there"):
                folder.check(resume=False)
        folder.check(resume=False)
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("telemetry", "is a file, a run needs a folder of that name"),
        ("logs", "is a file, a run needs a folder of that name"),
        ("checkpoints", "is a file, a run needs a folder of that name"),
        ("metrics.jsonl", "is a folder, a run needs a file of that name"),
    ],
)
def test_what_is_in_the_way_is_named(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture, name: str, message: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / name).mkdir() if "." in name else (run / name).write_text("")
    for ranks in ("1", "2"):
        assert train_here(monkeypatch, run, more=("--nproc", ranks)) == 2
        assert f"error: {run / name} {message}" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no folder")
def test_a_folder_that_takes_no_folder(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    more = ("--set", "job.run_dir=/proc/x")
    assert train_here(monkeypatch, tmp_path / "run", more=more) == 2
    assert "the run folder /proc/x cannot be made: /proc" in capsys.readouterr().err


# ---------------------------------------------------------------- its records


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"start": 1}'])
def test_a_damaged_history_is_set_aside(
    run: Path, monkeypatch: Patch, caplog: Logs, damage: str
) -> None:
    (run / "run.json").write_text(damage)
    given = flags(["training.steps=3"])
    assert run_here(monkeypatch, "train", str(run), "--resume", *given) == 0
    assert "run.json is damaged: moved to" in caplog.text
    assert (run / "run.json.damaged").read_text() == damage
    assert len(json.loads((run / "run.json").read_text())["starts"]) == 1


def test_the_commit_of_another_repository_is_not_ours(tmp_path: Path, monkeypatch: Patch) -> None:
    installed = tmp_path / "venv" / "run_folder.py"
    installed.parent.mkdir()
    installed.write_text("")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), (*author, "commit", "-q", "--allow-empty", "-m", "theirs")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(run_folder, "__file__", str(installed))
    assert run_folder.commit() is None


def test_a_failure_is_raised_though_it_cannot_be_recorded(
    tmp_path: Path, monkeypatch: Patch, caplog: Logs
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("the real one")

    monkeypatch.setattr(start, "record_failure", full)
    monkeypatch.setattr(rank_module, "run_rank", fail)
    config = load_config(None, [f"job.run_dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError, match="the real one"):
        start.become_rank(config, RankEnvironment(0, 2, 0, 2), resume=False)
    assert "the failure of rank 0 was not recorded: No space left" in caplog.text


# ---------------------------------------------------------------- changes on resume


def test_resume_says_what_is_not_as_before(run: Path, monkeypatch: Patch, caplog: Logs) -> None:
    caplog.set_level(logging.INFO)
    changes = flags(["training.steps=3", "training.global_batch_size=8", "optimizer.lr=0.002"])
    old = RunFolder(run).load_config().optimizer.lr
    assert run_here(monkeypatch, "train", str(run), "--resume", *changes) == 0
    (line,) = (line for line in caplog.messages if line.startswith("changed since"))
    for change in (
        "training.global_batch_size: 4 -> 8",
        "training.steps: 2 -> 3",
        f"optimizer.lr: {old} -> 0.002",
        f'-> "{run}"',
    ):
        assert change in line
    assert line.count(" -> ") == 4


def test_another_optimizer_is_refused(run: Path, monkeypatch: Patch, capsys: Capture) -> None:
    config = (run / "config.json").read_bytes()
    changes = flags(["training.steps=3", "optimizer.name=lamb"])
    assert run_here(monkeypatch, "train", str(run), "--resume", *changes) == 4
    assert "optimizer.name 'adamw', this start has 'lamb'" in capsys.readouterr().err
    assert (run / "config.json").read_bytes() == config


def test_nothing_to_do_is_said_and_nothing_written(
    run: Path, monkeypatch: Patch, caplog: Logs
) -> None:
    caplog.set_level(logging.INFO)
    before = tree(run)
    for name in ("lock", "telemetry/rank_00000.jsonl"):
        del before[name]
    changes = flags(["training.steps=1"])
    assert run_here(monkeypatch, "train", str(run), "--resume", *changes) == 0
    assert "nothing to do: the run is at step 2 of 1" in caplog.messages
    assert before.items() <= tree(run).items()
    assert RunFolder(run).load_config().training.steps == 2
