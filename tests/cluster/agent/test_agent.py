"""An agent from its start to its end: joins, starts, beats, tells of an exit, stops, leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from megascale.cluster.messages import Leave, StopRanks
from tests.cluster.agent.conftest import Ordered, StartAgent, gone_within
from tests.cluster.agent.fake_driver import FakeDriver
from tests.cluster.agent.programs import MOVES, SLEEPS


def test_join_start_beat_exit_stop(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    first = driver.result_of(driver.order(ordered(MOVES, num_ranks=2)))
    assert first.ok, first.reason
    assert driver.joins[0].facts.num_cpus == len(os.sched_getaffinity(0))
    pages = Path(json.loads((tmp_path / "agents" / "n0" / "processes.json").read_text())["pages"])
    names = [page.name for page in sorted(pages.iterdir())]
    assert names == ["owner", "rank00000-e1", "rank00001-e1"]
    moving = driver.rank(1, state="running")
    assert moving.progress is not None
    assert moving.progress.epoch == 1
    assert moving.progress.completed_phase == "backward"
    assert moving.rss_bytes is not None
    assert moving.rss_bytes > 1 << 20
    os.kill(moving.pid, signal.SIGKILL)
    began_s = time.monotonic()
    dead = driver.rank(1, state="exited")
    assert dead.exit_code == -signal.SIGKILL
    assert time.monotonic() - began_s < 3.0
    assert driver.rank(0).state == "running"
    stopped = driver.result_of(driver.order(StopRanks()))
    assert stopped.ok
    assert stopped.detail == {"exit_codes": {"0": -signal.SIGTERM}, "unkillable": []}
    assert "rank 1 starts in epoch 1" in (tmp_path / "logs" / "rank00001.log").read_text()
    left = driver.order(Leave())
    assert driver.result_of(left).ok
    assert agent.wait(10) == 0
    gone_within(tmp_path, 10.0)
    assert not pages.exists()


def test_killed_agent_leaves_nothing(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(SLEEPS, num_ranks=2))).ok
    record = json.loads((tmp_path / "agents" / "n0" / "processes.json").read_text())
    assert len(record["members"]) == 2
    agent.kill()
    agent.wait()
    gone_within(tmp_path, 10.0)
    assert not Path(record["pages"]).exists()
