"""A driver that is killed: the next one has its agents within 5 s, while ranks train on, however
long the backend takes beside a process that nobody can end."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from megascale.errors import LaunchError
from tests.cluster.driver.fakes import Agents, FakeAgent

READOPTION_S = 5.0


class Drivers:
    """The processes of one run folder, one after the other."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.agents = Agents()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, adopt_s: float = 0.0) -> None:
        """adopt_s: how long the backend takes to find out whose machines are there."""
        program = "tests.cluster.driver.driver_process"
        with (self.run_dir / "driver.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", program, str(self.run_dir), str(adopt_s)],
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def until(self, what: Callable[[dict[str, Any]], bool], timeout_s: float = 40.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status is not None and what(status):
                return
            log = (self.run_dir / "driver.log").read_text()
            assert time.monotonic() < deadline_s, f"{status}\n{log}"
            time.sleep(0.02)

    def status(self) -> dict[str, Any] | None:
        try:
            answer = httpx.get(self.url + "/v1/status", headers=self.headers, trust_env=False)
        except (OSError, httpx.HTTPError, ValueError):
            return None
        return dict(answer.json()) if answer.status_code == 200 else None

    @property
    def url(self) -> str:
        return str(json.loads((self.run_dir / "driver" / "address.json").read_text())["url"])

    @property
    def headers(self) -> dict[str, str]:
        token = (self.run_dir / "driver" / "token").read_text().strip()
        return {"Authorization": f"Bearer {token}"}

    def add_agents(self) -> None:
        token = self.headers["Authorization"].removeprefix("Bearer ")
        for name in ("n0", "n1"):
            self.agents.add(FakeAgent(name, self.url, token))

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.agents.close()


@contextmanager
def drivers(run_dir: Path) -> Iterator[Drivers]:
    made = Drivers(run_dir)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.full
def test_the_next_driver_readopts_agents_while_they_train(tmp_path: Path) -> None:
    with drivers(tmp_path) as made:
        made.start()
        made.until(lambda status: True)
        made.add_agents()
        made.until(lambda status: status["phase"] == "training" and (status["epoch_step"] or 0) > 3)
        agents = [made.agents["n0"], made.agents["n1"]]
        ranks = [rank for agent in agents for rank in agent.ranks]
        joins = [agent.joins for agent in agents]
        for number in (1, 2):
            made.kill()
            step = ranks[0].step
            time.sleep(0.5)
            assert ranks[0].step > step, "nobody waits for a driver"
            made.start(adopt_s=60.0 if number == 2 else 0.0)
            made.until(lambda status: True)
            answers_s = time.monotonic()
            made.until(lambda _, seen=joins: min(a.joins for a in agents) > max(seen))  # type: ignore[misc]
            assert time.monotonic() - answers_s < READOPTION_S
            joins = [agent.joins for agent in agents]
            at = made.status()
            assert at is not None
            assert (at["epoch"], at["phase"]) == (1 + number, "training")
            step = ranks[0].step
            made.until(lambda status, step=step: (status["epoch_step"] or 0) > step)  # type: ignore[misc]
            at = made.status()
            assert at is not None
            assert at["drivers"] == 1 + number
            assert at["readopted"]["agents"] == ["n0", "n1"]
            assert not at["readopted"]["missing"]
            assert 0.0 < at["readopted"]["seconds"] < READOPTION_S
        assert ranks == [rank for agent in agents for rank in agent.ranks], "not started again"
        assert not (made.status() or {"incidents": ["?"]})["incidents"]


@pytest.mark.full
def test_a_rank_that_dies_while_no_driver_is_there_is_found(tmp_path: Path) -> None:
    with drivers(tmp_path) as made:
        made.start()
        made.until(lambda status: True)
        made.add_agents()
        made.until(lambda status: status["phase"] == "training")
        made.kill()
        dead = made.agents["n1"].ranks[0]
        dead.state, dead.exit_code = "exited", -9
        made.start()
        made.until(lambda s: s["phase"] == "training" and s["epoch"] >= 3)
        assert (made.status() or {})["restarts"] in ({"ranks_missing": 1}, {"signal": 1})


def test_a_second_driver_on_the_folder_is_refused(tmp_path: Path) -> None:
    with drivers(tmp_path) as made:
        made.start()
        made.until(lambda status: True)
        second = subprocess.run(
            [sys.executable, "-m", "tests.cluster.driver.driver_process", str(tmp_path), "0"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode != 0
        assert "has a driver" in second.stderr
        assert made.status() is not None


def test_a_driver_whose_job_another_one_has_says_so_in_a_line(tmp_path: Path) -> None:
    with drivers(tmp_path) as made:
        made.start()
        made.until(lambda status: True)
        (tmp_path / "driver" / "lock").write_text("another driver\n")
        with suppress(httpx.HTTPError):  # it may be gone already
            httpx.post(made.url + "/v1/stop", headers=made.headers, trust_env=False)
        assert made.process is not None
        assert made.process.wait(20.0) == LaunchError.exit_code
        log = (tmp_path / "driver.log").read_text()
        assert "Traceback" not in log
        assert log.rstrip().splitlines()[-1].startswith("error: ")
        assert "names another driver; this one is stale and ends" in log
        journal = sqlite3.connect(tmp_path / "driver" / "journal.sqlite")
        kinds = [row[0] for row in journal.execute("SELECT kind FROM transitions")]
        journal.close()
        assert "StopRequested" not in kinds, "what it decides any more is nobody's business"
