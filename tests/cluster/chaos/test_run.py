"""Real jobs under real faults: a short one, and every kind once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megascale.cluster.backends import processes
from megascale.cluster.chaos.run import chaos
from megascale.errors import ConfigError, LaunchError
from tests.train.harness import TINY
from tools.blocks import ROOT

SETTINGS = [
    *TINY,
    "model.num_layers=2",
    "training.global_batch_size=4",
    "training.steps=100000",
    "validation.interval=0",
    "checkpoint.interval=5",
    "metrics.log_interval=1",
    "metrics.tensorboard=false",
    "cluster.shrink=false",
    "cluster.selfcheck=off",
]
JOB = "[job]\nnodes = 2\nprocs_per_node = 1\nspares = 1\ngap_steps = 3\nwithin_s = 60\n"


def _written(folder: Path, *faults: str) -> tuple[Path, Path]:
    """A schedule and an empty recipe."""
    schedule, recipe = folder / "schedule.toml", folder / "recipe.toml"
    parts = [f"[[fault]]\n{fault}\n" for fault in faults]
    schedule.write_text(f"seed = 7\n{JOB}" + "".join(parts))
    recipe.write_text("# all defaults\n")
    return schedule, recipe


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_killed_rank_a_second_driver_and_a_killed_driver(tmp_path: Path) -> None:
    files = _written(tmp_path, "kind = 'kill'", "kind = 'second_driver'", "kind = 'driver_kill'")
    said: list[str] = []
    result = chaos(*files, SETTINGS, folder=tmp_path / "run", say=said.append)
    assert result.ok, result.text()
    kill, second, driver = result.lines
    assert kill.cause == "signal"
    assert kill.right
    assert kill.closing.startswith("recovered")
    assert (kill.decided_s or 99.0) < 5.0
    assert kill.restarts == 1
    assert second.said["exit_code"] == LaunchError.exit_code
    assert driver.readopted_s is not None
    assert driver.restarts == 0
    checks = {check.name for job in result.jobs for check in job.checks}
    assert checks == {"loss", "samples", "orphans", "pages", "closed", "ledger"}
    assert len([line for line in said if "over after" in line]) == 3


@pytest.mark.full
def test_nothing_is_left_where_it_is_ended_in_the_middle(tmp_path: Path) -> None:
    schedule, recipe = _written(tmp_path, "kind = 'kill'\nat_s = 1000")
    run = tmp_path / "run"
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = ["chaos", str(schedule), str(recipe), "--run-dir", str(run), *words]
    process = subprocess.Popen([sys.executable, "-m", "megascale", *command])
    try:
        while not (run / "job-1" / "metrics.jsonl").exists():
            assert process.poll() is None, "it ended by itself"
            time.sleep(0.1)
    finally:
        process.terminate()
        code = process.wait(60.0)
    assert code == LaunchError.exit_code
    job = json.loads((run / "job-1" / "backend" / "local.json").read_text())["job"]
    assert processes.members(f"{job}/") == {}


def test_nothing_starts_where_something_is_wrong(tmp_path: Path) -> None:
    schedule, recipe = _written(tmp_path, "kind = 'kill'")
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match="parallelism"):
        chaos(schedule, recipe, ["parallelism.tensor_parallel_size=3"], folder=folder)
    assert not folder.exists()
    folder.mkdir()
    with pytest.raises(LaunchError, match="chaos starts in a new folder"):
        chaos(schedule, recipe, SETTINGS, folder=folder)
    assert not list(folder.iterdir())


@pytest.mark.full
def test_a_job_that_does_not_start_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    schedule, recipe = _written(tmp_path, "kind = 'kill'", "kind = 'exception'")
    broken = [*SETTINGS, "data.synthetic=false", "data.path=/nowhere"]
    result = chaos(schedule, recipe, broken, folder=tmp_path / "run", say=lambda _text: None)
    assert not result.ok
    assert [line.kind for line in result.lines] == ["kill", "exception"]
    assert all("chaos could not go on" in line.wrong for line in result.lines)
    assert "exited 3" in result.text()


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_every_kind_once(tmp_path: Path) -> None:
    schedule = ROOT / "chaos" / "matrix.toml"
    recipe = ROOT / "recipes" / "first-run.toml"
    result = chaos(schedule, recipe, [], folder=tmp_path / "run")
    assert result.ok, result.text()
