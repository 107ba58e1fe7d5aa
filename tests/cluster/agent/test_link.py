"""The agent and its driver: absent, returning, replaced, refusing."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from megascale.cluster.agent.commands import Orders, Results
from megascale.cluster.agent.facts import address_towards, node_facts
from megascale.cluster.agent.heartbeat import Fence
from megascale.cluster.agent.link import Backoff, Link, LinkError, RefusedError
from megascale.cluster.messages import Command, Leave, StopRanks
from megascale.errors import LaunchError
from tests.cluster.agent.conftest import Ordered, StartAgent, gone_within, of_test
from tests.cluster.agent.fake_driver import FakeDriver
from tests.cluster.agent.programs import IGNORES, SAVES, SLEEPS

pytestmark = pytest.mark.full


def test_a_driver_that_comes_back_finds_the_ranks_running(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    pid = driver.rank(0).pid
    driver.stop()
    time.sleep(1.5)
    driver.known.clear()
    driver.serve()
    driver.wait(lambda: len(driver.joins) == 2, 30.0, "second join")
    again = driver.joins[1]
    assert again.incarnation == driver.joins[0].incarnation
    assert again.epoch == 1
    assert [(r.rank, r.pid, r.state) for r in again.ranks] == [(0, pid, "starting")]
    assert driver.result_of(driver.order(StopRanks())).ok, "it takes commands again"


def test_a_driver_that_forgot_the_agent_is_joined_again(
    driver: FakeDriver, start_agent: StartAgent
) -> None:
    start_agent()
    driver.wait(lambda: driver.beats, 30.0, "beat")
    driver.known.clear()
    driver.wait(lambda: len(driver.joins) == 2, 30.0, "second join")


def test_the_rate_of_beats_is_kept_and_their_numbers_grow(
    driver: FakeDriver, start_agent: StartAgent
) -> None:
    start_agent()
    driver.wait(lambda: len(driver.beats) >= 25, 30.0, "25 beats")
    numbers = [beat.sequence for beat in driver.beats]
    assert numbers == sorted(set(numbers))
    took_s = driver.arrivals_s[24] - driver.arrivals_s[4]
    assert 1.8 < took_s < 6.0, "20 intervals of 0.1 s"


def test_beats_go_on_while_the_main_thread_hangs(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    """The main thread opens the rank's log: here a pipe that nobody reads, which blocks."""
    start_agent()
    driver.wait(lambda: driver.beats, 30.0, "beat")
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "rank00000.log")
    driver.order(ordered(SLEEPS))
    time.sleep(0.5)
    count = len(driver.beats)
    time.sleep(1.0)
    assert len(driver.beats) - count >= 3
    assert not driver.results


def test_commands_of_an_older_epoch_are_refused(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered
) -> None:
    start_agent()
    driver.epoch = 5
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    refused = driver.result_of(driver.order(StopRanks(), epoch=4))
    assert not refused.ok
    assert refused.reason == "epoch 4 is over; this agent knows 5"
    assert driver.rank(0).state == "starting"


def test_a_driver_that_was_replaced_is_not_obeyed(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    agent = start_agent()
    driver.epoch = 5
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    driver.epoch, driver.leave = 4, True
    time.sleep(0.5)
    assert agent.poll() is None
    assert len(of_test(tmp_path)) >= 2
    assert "a driver of epoch 4 answered, 5 is known" in (tmp_path / "agent-0.log").read_text()
    driver.epoch = 6
    assert agent.wait(30) == 0
    gone_within(tmp_path, 10.0)


def test_without_a_driver_ranks_save_and_the_agent_ends(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    driver.joined["orphan_timeout_s"] = 1.5
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(SAVES))).ok
    driver.wait(lambda: list(tmp_path.glob("*.ready")), 30.0, "rank")
    driver.stop()
    began_s = time.monotonic()
    assert agent.wait(20) == LaunchError.exit_code
    assert time.monotonic() - began_s > 1.3
    assert list(tmp_path.glob("*.saved"))
    log = (tmp_path / "agent-0.log").read_text()
    assert "leaving: no driver for" in log
    assert log.count("no driver:") <= 3, "a lost driver is not told at each beat"
    driver.serve()


def test_the_agent_waits_for_a_driver_that_is_late(
    driver: FakeDriver, start_agent: StartAgent
) -> None:
    driver.stop()
    agent = start_agent()
    time.sleep(2.0)
    driver.serve()
    driver.wait(lambda: driver.beats, 30.0, "beat")
    assert agent.poll() is None


def test_a_refused_join_ends_the_agent(
    driver: FakeDriver, start_agent: StartAgent, token_file: Path, tmp_path: Path
) -> None:
    token_file.write_text("another")
    assert start_agent().wait(30) == LaunchError.exit_code
    assert "refuses /v1/join with 401" in (tmp_path / "agent-0.log").read_text()


@pytest.mark.parametrize(("status", "is_final"), [(401, False), (422, False), (403, True)])
def test_ranks_outlive_every_refusal_but_one(
    status: int,
    is_final: bool,
    driver: FakeDriver,
    start_agent: StartAgent,
    ordered: Ordered,
    tmp_path: Path,
) -> None:
    """A driver that comes back may refuse for a while; one that evicted the node will for ever."""
    agent = start_agent()
    assert driver.result_of(driver.order(ordered(SLEEPS))).ok
    driver.refuses = {"/v1/heartbeat": status, "/v1/join": status}
    if is_final:
        assert agent.wait(30) == LaunchError.exit_code
        gone_within(tmp_path, 10.0)
        return
    time.sleep(1.0)
    driver.refuses = {}
    driver.wait(lambda: len(driver.joins) == 2, 30.0, "second join")
    assert len(driver.joins[1].ranks) == 1


def test_results_wait_for_the_driver(
    driver: FakeDriver, start_agent: StartAgent, ordered: Ordered, tmp_path: Path
) -> None:
    start_agent()
    assert driver.result_of(driver.order(ordered(IGNORES))).ok
    driver.wait(lambda: list(tmp_path.glob("*.ready")), 30.0, "rank")
    stop = driver.order(StopRanks(save=True))
    pid = driver.rank(0).pid
    time.sleep(0.3)
    driver.stop()
    os.kill(pid, signal.SIGKILL)
    time.sleep(1.0)
    driver.serve()
    assert driver.result_of(stop).ok
    driver.wait(lambda: driver.beats[-1].done == stop, 30.0, "beat with done")


class _Silent(Results):
    def __init__(self) -> None:
        self.refused: list[int] = []

    def begun(self, command: Command) -> None: ...

    def put(self, command: Command, **_: object) -> None:
        self.refused.append(command.sequence)


def test_a_command_is_obeyed_once() -> None:
    taken: list[Command] = []
    results = _Silent()
    orders = Orders(None, None, None, Fence(), results, taken.append)  # type: ignore[arg-type]
    for sequence, epoch in ((1, 1), (2, 1), (2, 1), (1, 1), (5, 3), (6, 2), (4, 3), (7, 3)):
        orders.receive(Command(epoch=epoch, sequence=sequence, order=Leave()))
    assert [command.sequence for command in taken] == [1, 2, 5, 7]
    assert results.refused == [6]


def test_done_is_what_everything_before_is_done_of() -> None:
    results = Results(None, _identity())  # type: ignore[arg-type]
    commands = [Command(epoch=1, sequence=n, order=Leave()) for n in (3, 4, 5)]
    assert results.done() == 0
    for command in commands:
        results.begun(command)
    assert results.done() == 2
    results.put(commands[1], ok=True)
    assert results.done() == 2
    results.put(commands[0], ok=True)
    assert results.done() == 4


def test_waits_double_up_to_a_bound_and_are_spread() -> None:
    backoff = Backoff(0.2, 5.0)
    waits = [backoff.next_s() for _ in range(40)]
    for wait_s, whole_s in zip(waits, [0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 35], strict=True):
        assert whole_s / 2 <= wait_s <= whole_s
    assert len(set(waits)) == len(waits)


@pytest.mark.parametrize("status", [b"HTTP/1.1 500 x", b"HTTP/1.1 200 OK", b"nonsense"])
def test_an_answer_that_is_none_is_a_lost_driver(status: bytes, token_file: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(status + b"\r\nContent-Length: 2\r\n\r\n{}")

        threading.Thread(target=answer, daemon=True).start()
        link = Link(f"http://127.0.0.1:{server.getsockname()[1]}", token_file)
        with pytest.raises(LinkError):
            link.commands("n0", "i", 0)
        link.close()


def test_refusals_say_what_to_do(driver: FakeDriver, token_file: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--driver is 'node0:29000'; it must be http://"):
        Link("node0:29000", token_file)
    with pytest.raises(LaunchError, match="--token-file names the file that the driver wrote"):
        Link(driver.url, tmp_path / "none")
    token_file.write_text("another")
    link = Link(driver.url, token_file)
    with pytest.raises(RefusedError, match="refuses /v1/commands with 401"):
        link.commands("n0", "i", 0)
    link.close()


def test_the_address_is_the_one_towards_the_driver() -> None:
    assert address_towards("http://127.0.0.1:29000") == "127.0.0.1"
    assert address_towards("http://no.such.host.invalid:29000") == "127.0.0.1"


def _identity() -> object:
    from megascale.cluster.agent.agent import Settings
    from megascale.cluster.agent.heartbeat import Identity

    settings = Settings("http://127.0.0.1:1", Path("t"), "n0", Path("r"), "h", "127.0.0.1")
    return Identity("n0", "i", node_facts(settings, ["H200"]))
