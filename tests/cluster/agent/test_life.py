"""How ranks end under an agent, with real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megascale.cluster.agent.proc import all_stats, read_stat
from megascale.cluster.messages import StopRanks
from tests.cluster.agent.conftest import Ordered, StartAgent, gone_within, of_test, pids_in
from tests.cluster.agent.fake_driver import FakeDriver
from tests.cluster.agent.programs import FAMILY, IGNORES, MOVES, SLEEPS

pytestmark = pytest.mark.full


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_agent_ends_on_request(
    signum: int, driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    agent.send_signal(signum)
    assert agent.wait(30) == 0
    gone_within(tmp_path, 10.0)


def test_a_rank_takes_its_family_along(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    """By its own end, as by a stop: what has left its group and lost its parent as well."""
    agent = start_agent()
    for epoch, ending in ((1, "raise SystemExit(3)"), (2, "time.sleep(600)")):
        driver.epoch = epoch
        code = f"{FAMILY}\ntime.sleep(1.5)\n{ending}\n"
        assert driver.result_of(driver.order(ordered(code))).ok
        family = pids_in(tmp_path / "family", 4)
        (tmp_path / "family").unlink()
        if epoch == 1:
            assert driver.rank(0, state="exited").exit_code == 3
        else:
            time.sleep(1.5)
        stopped = driver.result_of(driver.order(StopRanks()))
        assert stopped.ok, stopped.reason
        give_up = time.monotonic() + 10.0
        while any(stat and stat.is_alive for stat in map(read_stat, family)):
            assert time.monotonic() < give_up, family
            time.sleep(0.02)
    zombies = [s for s in all_stats().values() if s.parent == agent.pid and not s.is_alive]
    assert not zombies


def test_what_dies_on_a_node_without_ranks_is_collected(
    driver: FakeDriver, start_agent: StartAgent, tmp_path: Path
) -> None:
    """Such as a template's child that its agent never heard of."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if sys.orig_argv[1:3] == ['-m', 'megascale.cluster.agent']:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os.setsid()\n"
        "        os._exit(0)\n"
        f"    open({str(tmp_path / 'child')!r}, 'w').write(str(pid))\n"
    )
    agent = start_agent(path=str(hook))
    driver.wait(lambda: driver.beats, 20.0, "heartbeat")
    child = int((tmp_path / "child").read_text())
    driver.wait(lambda: read_stat(child) is None, 10.0, f"end of {child} under {agent.pid}")


def test_a_killed_agent_takes_families_along(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(f"{FAMILY}\ntime.sleep(600)\n"))).ok
    pids_in(tmp_path / "family", 4)
    agent.kill()
    agent.wait()
    gone_within(tmp_path, 10.0)


def test_the_next_agent_ends_what_the_last_one_and_its_watchdog_left(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(f"{FAMILY}\ntime.sleep(600)\n"))).ok
    *family, rank = pids_in(tmp_path / "family", 4)
    children = [stat.pid for stat in all_stats().values() if stat.parent == agent.pid]
    (watchdog,) = [pid for pid in children if _is_watchdog(pid)]
    os.kill(watchdog, signal.SIGSTOP)  # a killed one would be started again
    agent.kill()
    agent.wait()
    os.kill(watchdog, signal.SIGKILL)
    time.sleep(0.3)
    assert set(of_test(tmp_path)) & {*family, rank} == set(family), "the rank died with its agent"
    again = start_agent()
    driver.wait(lambda: len(driver.joins) == 2, 30.0, "second join")
    assert not set(of_test(tmp_path)) & set(family)
    assert driver.joins[1].incarnation != driver.joins[0].incarnation
    assert again.poll() is None


def test_a_watchdog_that_is_late_leaves_the_next_agents_ranks_alone(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    children = [stat.pid for stat in all_stats().values() if stat.parent == agent.pid]
    (watchdog,) = [pid for pid in children if _is_watchdog(pid)]
    os.kill(watchdog, signal.SIGSTOP)
    try:
        agent.kill()
        agent.wait()
        driver.forget()
        start_agent()
        driver.wait(lambda: len(driver.joins) == 2, 30.0, "second join")
        driver.epoch = 2
        assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    finally:
        os.kill(watchdog, signal.SIGCONT)
    give_up = time.monotonic() + 10.0
    while (stat := read_stat(watchdog)) is not None and stat.is_alive:
        assert time.monotonic() < give_up
        time.sleep(0.02)
    time.sleep(0.3)
    assert driver.rank(0).state == "starting"


def _is_watchdog(pid: int) -> bool:
    return b"agent.watchdog" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_node_has_one_agent(start_agent: StartAgent, driver: FakeDriver, tmp_path: Path) -> None:
    start_agent()
    driver.wait(lambda: driver.joins, 30.0, "join")
    second = start_agent()
    assert second.wait(30) == 5
    assert "an agent of node n0 is running already" in (tmp_path / "agent-1.log").read_text()


def test_a_stopped_process_is_alive_and_makes_no_progress(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    assert driver.result_of(driver.order(ordered(MOVES))).ok
    pid = driver.rank(0, state="running").pid
    os.kill(pid, signal.SIGSTOP)
    driver.rank(0, os_state="T")
    time.sleep(1.0)
    report = driver.rank(0, os_state="T")
    assert report.state == "running"
    assert report.progress is not None
    assert 0.9 < report.progress.age_s < 9.0
    began_s = time.monotonic()
    assert driver.result_of(driver.order(StopRanks())).ok, "it is ended all the same"
    assert 1.0 <= time.monotonic() - began_s < 6.0, "after its grace"


def test_a_rank_that_ignores_the_request_is_killed(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    start_agent()
    assert driver.result_of(driver.order(ordered(IGNORES))).ok
    driver.wait(lambda: list(tmp_path.glob("*.ready")), 30.0, "rank")
    saving = driver.order(StopRanks(save=True))
    time.sleep(1.5)
    assert not driver.results[1:], "one that saves has longer than its grace"
    began_s = time.monotonic()
    stopped = driver.result_of(driver.order(StopRanks()))
    assert stopped.detail["exit_codes"] == {"0": -signal.SIGKILL}
    assert driver.result_of(saving).ok
    assert 0.9 < time.monotonic() - began_s < 6.0, "the later request shortens the first"


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.skipif(not os.access(FREEZER, os.W_OK), reason="no writable cgroup v1 freezer")
def test_what_cannot_be_killed_is_reported_and_waited_for_no_longer(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    driver.joined["kill_deadline_s"] = 1.0
    start_agent()
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    pid = driver.rank(0).pid
    group = FREEZER / f"agent-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        stopped = driver.result_of(driver.order(StopRanks()), timeout_s=20.0)
        assert not stopped.ok
        assert stopped.detail["unkillable"] == [pid]
        assert driver.rank(0, state="unkillable").os_state == "D"
        driver.epoch = 2
        refused = driver.result_of(driver.order(ordered(SLEEPS)))
        assert not refused.ok
        assert f"rank 0 of epoch 1 (pid {pid}, unkillable)" in refused.reason
    finally:
        (group / "freezer.state").write_text("THAWED")
        give_up = time.monotonic() + 10.0
        while (group / "cgroup.procs").read_text():
            assert time.monotonic() < give_up
            time.sleep(0.02)
        group.rmdir()
    code = driver.rank(0, state="exited").exit_code
    assert code in (-signal.SIGTERM, -signal.SIGKILL), "whichever it sees first"
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok


def test_starts_are_obeyed_once_and_wait_for_stops(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    first = driver.result_of(driver.order(ordered(SLEEPS)))
    again = driver.result_of(driver.order(ordered(SLEEPS)))
    assert first.detail == again.detail
    driver.epoch = 2
    refused = driver.result_of(driver.order(ordered(SLEEPS)))
    assert not refused.ok
    assert "rank 0 of epoch 1" in refused.reason
    stop = driver.order(StopRanks())
    second = driver.result_of(driver.order(ordered(SLEEPS)))
    assert second.ok
    assert driver.result_of(stop).ok
    assert second.detail != first.detail


def test_a_program_that_is_not_there_is_a_failed_launch(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    order = ordered(SLEEPS).model_copy(update={"program": ["/nowhere/python"]})
    driver.order(order)
    failure = driver.rank(0, state="exited").failure
    assert failure is not None
    assert (failure.kind, failure.exit_code) == ("launch", 127)
    assert "/nowhere/python cannot be executed: No such file" in failure.message
