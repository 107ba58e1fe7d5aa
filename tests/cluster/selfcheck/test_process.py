"""Workers are bounded: what hangs or dies is ended with all it started, and the rest is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.selfcheck.process import (
    AFTER_FAILURE_S,
    Job,
    run_in_turn,
    run_together,
    worker_command,
)
from tests.cluster.selfcheck.alive import children, gone, written_pid
from tools.blocks import ROOT

MODULE = "tests.cluster.selfcheck.worker"
PATH = {"PYTHONPATH": str(ROOT)}


def job(name: str, limit_s: float = 20.0, reserve_s: float = 0.0, **arguments: Any) -> Job:
    return Job(name, arguments, limit_s, reserve_s)


def do(*jobs: Job, deadline_s: float = 60.0) -> dict[str, Any]:
    return dict(run_in_turn(MODULE, jobs, time.monotonic() + deadline_s, PATH))


def test_jobs_share_a_process_and_libraries_may_talk() -> None:
    got = do(job("a", noise_bytes=300_000), job("b"))
    assert got["a"].result["pid"] == got["b"].result["pid"]
    assert children() == []


def test_an_error_costs_only_its_job() -> None:
    got = do(job("a", error="ValueError: wrong"), job("b"))
    assert (got["a"].kind, got["a"].reason) == ("error", "ValueError: wrong")
    assert got["b"].result is not None


def test_a_death_is_told_with_its_code_and_last_words_and_the_rest_is_done() -> None:
    got = do(job("a"), job("b", at="the driver", exit=3), job("c"))
    assert got["b"].kind == "died"
    assert got["b"].reason == "its process exited 3: no such device (at the driver)"
    assert got["c"].result["pid"] != got["a"].result["pid"]


def test_a_hang_is_ended_with_its_children_and_the_rest_is_done(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    start = time.monotonic()
    got = do(job("a", limit_s=4.0, sleep_s=600.0, at="GPU 3", child=str(file)), job("b"))
    assert time.monotonic() - start < 30
    assert got["a"].kind == "hung"
    assert "at GPU 3; its processes were killed" in got["a"].reason
    assert got["b"].result is not None
    assert gone(int(file.read_text()))
    assert children() == []


def test_children_of_a_worker_that_ended_well_are_ended_too(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert do(job("a", child=str(file)))["a"].result is not None
    assert gone(int(file.read_text()))


def test_the_deadline_holds_and_what_was_not_begun_is_late() -> None:
    start = time.monotonic()
    got = do(job("a", sleep_s=600.0), job("b", sleep_s=600.0), job("c"), deadline_s=1.5)
    assert time.monotonic() - start < 1.5 + 1.0
    assert [got[name].kind for name in "abc"] == ["hung", "late", "late"]
    assert children() == []


def test_a_hang_leaves_time_for_those_after_it() -> None:
    limit = job("a", limit_s=30.0, reserve_s=12.0).limit(100.0, 120.0)
    assert limit == pytest.approx(110.0)  # half of the time, where the reserve takes more
    assert job("a", limit_s=30.0, reserve_s=5.0).limit(100.0, 120.0) == pytest.approx(115.0)
    assert job("a", limit_s=3.0, reserve_s=5.0).limit(100.0, 120.0) == pytest.approx(103.0)


def test_together_one_failure_ends_the_wait_for_the_others() -> None:
    commands = [
        worker_command(MODULE, [job("a", exit=1)]),
        worker_command(MODULE, [job("a", sleep_s=600.0)]),
        worker_command(MODULE, [job("a")]),
    ]
    start = time.monotonic()
    got = run_together(commands, "a", start + 60.0, PATH)
    assert [outcome.kind for outcome in got] == ["died", "hung", ""]
    assert time.monotonic() - start < 20 + AFTER_FAILURE_S
    assert children() == []


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The checks' own workers, hung; nobody is left to end them but the kernel."""
    program = (
        "import sys, time; from megascale.cluster.selfcheck.process import Job, Worker, "
        "worker_command; w = Worker(worker_command(sys.argv[1], [Job(sys.argv[2], "
        "{'fault': 'hang'}, 9)]), {}); open(sys.argv[3], 'w').write(str(w._process.pid)); "
        "time.sleep(600)"
    )
    for module, name in (
        ("megascale.cluster.selfcheck.probe", "host"),
        ("megascale.train.selfcheck", "gemm"),
    ):
        file = tmp_path / name
        argv = [sys.executable, "-c", program, module, name, str(file)]
        parent = subprocess.Popen(argv, cwd=ROOT)
        pid = written_pid(file)
        _wait_until_it_sleeps(pid)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert gone(pid), module


def _wait_until_it_sleeps(pid: int) -> None:
    """In the fault's `time.sleep`: past its start, in which it asks to die with its parent."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        if "nanosleep" in Path(f"/proc/{pid}/wchan").read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} does not sleep: {json.dumps(pid)}")
