"""A fake driver, agents as processes, and small programs as ranks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megascale.cluster.agent import warm_calm, warm_process, warm_template
from megascale.cluster.agent.proc import all_stats, marker_of
from megascale.cluster.messages import RankPlace, StartRanks
from tests.cluster.agent.fake_driver import TOKEN, FakeDriver
from tests.cluster.agent.pools import BASE, TEMPLATE, Pool
from tools.blocks import ROOT

StartAgent = Callable[..., subprocess.Popen[bytes]]
Ordered = Callable[..., StartRanks]


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    fake = FakeDriver()
    yield fake
    fake.stop()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return file


@pytest.fixture
def start_agent(tmp_path: Path, token_file: Path, driver: FakeDriver) -> Iterator[StartAgent]:
    """Starts agents of node n0; at the end they and all that they started are ended."""
    agents: list[subprocess.Popen[bytes]] = []
    command = [sys.executable, "-m", "megascale.cluster.agent", "--driver", driver.url]
    command += ["--token-file", str(token_file), "--run-dir", str(tmp_path)]

    def start(*arguments: str, node: str = "n0", path: str = "") -> subprocess.Popen[bytes]:
        log = (tmp_path / f"agent-{len(agents)}.log").open("wb")
        with log:
            agents.append(
                subprocess.Popen(
                    [*command, "--node", node, *arguments],
                    stdout=log,
                    stderr=log,
                    cwd=ROOT,
                    env={
                        **os.environ,
                        "PYTHONPATH": f"{path}:{ROOT}",
                        "TEST_FOLDER": str(tmp_path),
                    },
                )
            )
        return agents[-1]

    yield start
    for agent in agents:
        if agent.poll() is None:
            agent.kill()
        agent.wait()
    for log in sorted(tmp_path.glob("agent-*.log")):
        print(f"--- {log.name}\n{log.read_text()}")
    gone_within(tmp_path, 10.0)


@pytest.fixture
def ordered(tmp_path: Path) -> Ordered:
    """An order to start ranks that run a piece of Python."""

    def make(code: str, *, num_ranks: int = 1, **environment: str) -> StartRanks:
        program = tmp_path / f"rank-{abs(hash(code))}.py"
        program.write_text(code)
        return StartRanks(
            ranks=[RankPlace(rank=r, local_rank=r) for r in range(num_ranks)],
            world_size=num_ranks,
            local_world_size=num_ranks,
            master_addr="127.0.0.1",
            master_port=29999,
            arguments=[],
            program=[sys.executable, str(program)],
            environment={"PYTHONPATH": str(ROOT), **environment},
            run_dir=str(tmp_path),
        )

    return make


def of_test(tmp_path: Path) -> list[int]:
    """Living processes that have the test's folder in their environment."""
    marker = f"TEST_FOLDER={tmp_path}".encode()
    return [s.pid for s in all_stats().values() if marker_of(s, marker) and s.pid != os.getpid()]


def gone_within(tmp_path: Path, timeout_s: float) -> None:
    """All processes of the test end in this time."""
    give_up = time.monotonic() + timeout_s
    while left := of_test(tmp_path):
        assert time.monotonic() < give_up, f"still there: {left}"
        time.sleep(0.02)


def pids_in(file: Path, count: int, timeout_s: float = 10.0) -> list[int]:
    """`count` whole numbers, a line each, that ranks append to `file`."""
    give_up = time.monotonic() + timeout_s
    while True:
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        if len(lines) >= count:
            return [int(line) for line in lines]
        assert time.monotonic() < give_up, f"{file} has {lines}"
        time.sleep(0.02)


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    made = Pool(tmp_path)
    monkeypatch.setattr(warm_process, "PROGRAM", (str(made.program),))
    monkeypatch.setattr(warm_calm, "QUIET_S", 0.0)
    yield made
    for process in made.taken:
        process.kill()
        process.wait()
    made.warm.close()
    assert not made.pids


@pytest.fixture
def forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool with a template that imports nothing; its file is template.py."""
    monkeypatch.setitem(BASE, "PYTHONPATH", str(ROOT))
    made = Pool(tmp_path, forks=True)
    program = tmp_path / "template.py"
    program.write_text(TEMPLATE.replace("THREAD", "False"))
    monkeypatch.setattr(warm_template, "PROGRAM", (str(program),))
    monkeypatch.setattr(warm_process, "PROGRAM", (str(made.program),))
    monkeypatch.setattr(warm_calm, "QUIET_S", 0.0)
    adopts = ctypes.CDLL(None).prctl
    adopts(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield made
    for process in made.taken:
        process.kill()
        process.wait()
    made.warm.close()
    adopts(36, 0, 0, 0, 0)
    assert not made.pids
