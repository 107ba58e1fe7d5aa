"""Warm processes under real agents."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from megascale.cluster.agent.proc import read_stat
from megascale.cluster.messages import RunSelfCheck, StartRanks, StopRanks
from tests.cluster.agent.conftest import Ordered, StartAgent, gone_within
from tests.cluster.agent.fake_driver import FakeDriver
from tests.cluster.agent.programs import SLEEPS
from tools.blocks import ROOT


def _ours(order: StartRanks, *arguments: str, **environment: str) -> StartRanks:
    return order.model_copy(
        update={"program": None, "arguments": list(arguments), "environment": environment}
    )


def _ready(driver: FakeDriver, tmp_path: Path, count: int) -> list[int]:
    """Pids that the agent has called ready."""
    log = tmp_path / "agent-0.log"

    def look() -> list[int]:
        lines = [line for line in log.read_text().splitlines() if "is ready after" in line]
        return [int(line.partition("(pid ")[2].partition(")")[0]) for line in lines]

    driver.wait(lambda: len(look()) >= count, 90.0, f"{count} warm processes")
    return look()


def _want(driver: FakeDriver, mode: str, num_ranks: int) -> None:
    cast("dict[str, Any]", driver.joined).update(warm=mode, procs_per_node=num_ranks)


def _members(tmp_path: Path) -> Mapping[int, int]:
    record = json.loads((tmp_path / "agents" / "n0" / "processes.json").read_text())
    return {member["pid"]: member["rank"] for member in record["members"]}


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the package, which nobody edits during the test."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # else the agent's folder, the root, comes first
    folder = tmp_path / "copy"
    shutil.copytree(ROOT / "megascale", folder / "megascale")
    return folder


@pytest.mark.full
def test_a_warm_process_becomes_the_rank_and_another_program_ignores_it(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path, copy: Path
) -> None:
    _want(driver, "all", 1)
    start_agent(path=str(copy))
    (first,) = _ready(driver, tmp_path, 1)
    assert _members(tmp_path)[first] == -1
    started = driver.result_of(driver.order(_ours(ordered(SLEEPS), "train", "/nowhere.toml")))
    assert started.detail["pids"] == {"0": first}
    dead = driver.rank(0, state="exited")
    assert (dead.exit_code, dead.pid) == (2, first)
    log = tmp_path / "logs" / "rank00000.log"
    assert "rank 0 starts in epoch 1\nerror: " in log.read_text()
    assert driver.result_of(driver.order(StopRanks())).ok
    second = _ready(driver, tmp_path, 2)[1]
    driver.epoch = 2
    other = driver.result_of(driver.order(_ours(ordered(SLEEPS), "version", COLOUR="blue")))
    assert other.detail["pids"]["0"] != second
    assert driver.rank(0, state="exited", epoch=2).exit_code == 0
    assert "starts in epoch 2\n0." in log.read_text()
    assert driver.result_of(driver.order(StopRanks())).ok
    third = _ready(driver, tmp_path, 3)[2]
    assert b"COLOUR=blue" in Path(f"/proc/{third}/environ").read_bytes()
    driver.epoch = 3
    assert driver.result_of(driver.order(ordered(SLEEPS))).detail["pids"]["0"] != third
    driver.wait(lambda: read_stat(third) is None, 10.0, "its end: nobody needs it")


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_leaves_no_warm_process(
    signum: int,
    driver: FakeDriver,
    start_agent: StartAgent,
    ordered: Ordered,
    tmp_path: Path,
    copy: Path,
) -> None:
    """Nor a rank that was one, nor what that has forked, wherever it went."""
    forks = tmp_path / "forks.py"
    forks.write_text(
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    open(__file__ + '.forked', 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    _want(driver, "all", 1)
    _hook(copy, forks)
    agent = start_agent(path=str(copy))
    (first,) = _ready(driver, tmp_path, 1)
    driver.wait(lambda: _members(tmp_path), 5.0, "the record")
    assert driver.result_of(driver.order(_ours(ordered(SLEEPS), "fork"))).ok
    forked = Path(f"{forks}.forked")
    driver.wait(lambda: forked.exists() and forked.read_text(), 30.0, "the fork")
    pid = int(forked.read_text())
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"/rank00000-e1\0" in environ
    assert b"MEGASCALE_EPOCH=1\0" in environ
    driver.rank(0, pid=first)
    agent.send_signal(signum)
    assert agent.wait(30) == (-signum if signum == signal.SIGKILL else 0)
    gone_within(tmp_path, 10.0)
    stat = read_stat(pid)
    assert stat is None or not stat.is_alive


@pytest.mark.full
def test_the_first_self_check_waits_for_the_template_and_the_next_has_one(
    driver: FakeDriver, start_agent: StartAgent, tmp_path: Path, copy: Path
) -> None:
    """Its answer is that of a check that starts anew, from workers that imported nothing."""
    _want(driver, "all", 1)
    start_agent(path=str(copy))
    log = tmp_path / "agent-0.log"

    def come() -> bool:
        return log.read_text().count("the next self-check") == count

    count = 1
    for _ in range(2):  # taken, and another came
        count += 1
        order = RunSelfCheck(level="light", deadline_s=120.0)
        result = driver.result_of(driver.order(order), timeout_s=100.0)
        assert result.ok, result
        names = [check["name"] for check in result.detail["checks"]]
        assert names == ["host", "gpus", "memory", "gemm", "replay"]
        driver.wait(come, 30.0, "the next")


def _hook(copy: Path, program: Path) -> None:
    """`megascale fork` in a warm process runs `program`."""
    (copy / "sitecustomize.py").write_text(
        "import os, runpy, sys\n"
        "def fork(main):\n"
        "    def run():\n"
        f"        runpy.run_path({str(program)!r}) if sys.argv[1:] == ['fork'] else main()\n"
        "    return run\n"
        "if 'megascale.train.template' in ' '.join(sys.orig_argv):\n"
        "    import megascale.cli\n"
        "    megascale.cli.main = fork(megascale.cli.main)\n"
    )
