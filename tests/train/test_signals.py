"""Ranks as processes: told to stop, killed, or failing to start. What happens, what is said, when.

Stopping is an agreement: whichever process gets the signal, all ranks save the same step and the
exit code is 0. A failure ends all ranks at once and is shown once, with the rank that was first.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from megascale.checkpoint import read_meta
from megascale.checkpoint.saved_model import find_checkpoint
from megascale.events import Incident, read_events
from tests.train.command import (
    FRESH,
    SMALL,
    Process,
    end,
    flags,
    num_lines,
    rank_process,
    started,
    wait_until,
    write_recipe,
)
from tests.train.runs import checkpoints, metrics

pytestmark = pytest.mark.full


def _arguments(run: Path, *settings: str) -> list[str]:
    given = flags([*SMALL, f"job.run_dir={run}", *settings])
    return ["train", str(write_recipe(run.parent)), "--nproc", "2", *given]


def _wait_for_steps(run: Path, process: Process, count: int = 3) -> None:
    wait_until(lambda: num_lines(run / "metrics.jsonl") >= count, process)


def _saved_steps(run: Path) -> list[int | None]:
    """What each rank says that it saved."""
    files = sorted((run / "telemetry").glob("rank_*.jsonl"))
    events = [event for file in files for event in read_events(file)]
    incidents = [event for event in events if isinstance(event, Incident)]
    return [event.step for event in incidents if event.name == "checkpoint"]


@pytest.mark.parametrize(
    ("target", "program"), [("parent", FRESH), ("rank 1", ())], ids=["parent", "rank 1"]
)
def test_sigterm_saves_the_same_step_everywhere(
    tmp_path: Path, target: str, program: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    with started(_arguments(run, "training.steps=100000"), program) as process:
        _wait_for_steps(run, process)
        if target == "parent":
            process.send_signal(signal.SIGTERM)
        else:
            rank_process(process, int(target[-1])).send_signal(signal.SIGTERM)
        code, output, errors = end(process)
    assert code == 0, errors
    step = metrics(run)[-1]["step"]
    assert _saved_steps(run) == [step, step]
    assert checkpoints(run) == [f"step-{step:08d}"]
    assert read_meta(find_checkpoint(run))["consumed_samples"] == 4 * step
    assert f"asked to stop: saving step {step}" in output


def test_a_closed_terminal_saves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(_arguments(run, "training.steps=100000")) as process:
        _wait_for_steps(run, process)
        process.send_signal(signal.SIGHUP)
        code, _, errors = end(process)
    assert code == 0, errors
    assert checkpoints(run) == [f"step-{metrics(run)[-1]['step']:08d}"]


def test_stopped_without_checkpoints_it_says_that_nothing_is_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(_arguments(run, "training.steps=100000", "checkpoint.enable=false")) as process:
        _wait_for_steps(run, process)
        process.send_signal(signal.SIGTERM)
        code, output, errors = end(process)
    assert code == 0, errors
    step = metrics(run)[-1]["step"]
    assert f"asked to stop at step {step}: nothing is saved (checkpoint.enable = false)" in output
    assert "saving step" not in output


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(_arguments(run, "training.steps=100000")) as process:
        _wait_for_steps(run, process)
        process.send_signal(signal.SIGINT)
        assert end(process)[0] == 0
    step = metrics(run)[-1]["step"]
    more = [*_arguments(run, f"training.steps={step + 2}"), "--resume"]
    with started(more) as process:
        code, output, errors = end(process)
    assert code == 0, errors
    assert f"at step {step}\n" in output
    assert [line["step"] for line in metrics(run)] == list(range(1, step + 3))


def test_stopped_before_it_trained(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(_arguments(run), FRESH) as process:
        wait_until((run / "logs" / "rank00001.log").exists, process)
        process.send_signal(signal.SIGTERM)
        code, output, errors = end(process)
    assert (code, output) == (5, "")
    assert errors == "error: stopped by SIGTERM while no step was running\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_within_seconds(tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    with started(_arguments(run, "training.steps=100000")) as process:
        _wait_for_steps(run, process)
        ranks = psutil.Process(process.pid).children()
        rank_process(process, rank).kill()
        since = time.monotonic()
        code, _, errors = end(process)
        assert time.monotonic() - since < 10
    assert code == 5
    assert errors.count("error:") == 1
    assert f"error: rank {rank} of 2 was ended by SIGKILL; all ranks were stopped" in errors
    assert not any(one.is_running() for one in ranks)


def test_ranks_save_and_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with started(_arguments(run, "training.steps=100000")) as process:
        _wait_for_steps(run, process)
        ranks = psutil.Process(process.pid).children()
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=30)
    for rank in alive:
        rank.kill()
    assert not alive
    assert len(checkpoints(run)) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_an_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    with started(_arguments(tmp_path / "run", "training.device=cuda")) as process:
        code, output, errors = end(process)
    assert code == 2
    assert output == ""
    assert errors.count("error:") == errors.count("no CUDA device") == 1
    assert errors.startswith(("error: rank 0 of 2: local rank 0", "error: rank 1 of 2: local rank"))


def test_one_rank_that_cannot_start_ends_all(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "telemetry" / "rank_00001.jsonl").mkdir(parents=True)  # where its events should go
    with started(_arguments(run)) as process:
        code, _, errors = end(process)
    assert code == 1
    assert errors.startswith("error: rank 1 of 2: IsADirectoryError: ")
    assert errors.count("error:") == 1
