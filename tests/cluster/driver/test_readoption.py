"""What a new driver waits for (the agents), what not (its backend), and when it says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megascale.cluster.actions import EvictNode
from megascale.cluster.backends.base import BackendError, FencedError, Machine
from megascale.cluster.driver import actions
from megascale.cluster.driver.actions import Hands
from megascale.cluster.driver.desk import Desk
from megascale.cluster.driver.program import Program
from megascale.cluster.driver.readoption import PATIENCE_S, Readoption
from megascale.cluster.job import JobState
from megascale.cluster.transitions import NodeGone, NodeJoined, Readopted, Tick
from tests.cluster.driver.fakes import PaperBackend
from tests.cluster.driver.test_ladder import training


def joined(node: str, incarnation: str = "") -> NodeJoined:
    return NodeJoined(node, incarnation or f"i-{node}", f"host-{node}", "ip", epoch=1)


def test_it_is_said_once_when_all_have_come() -> None:
    job = training().job
    seen = Readoption(job, 100.0)
    assert seen.see(joined("n1"), job, 100.5) is None
    assert seen.see(joined("n1"), job, 100.6) is None
    assert seen.see(joined("n0"), job, 101.5) == Readopted(("n0", "n1"), (), 1.5)
    assert seen.see(Tick(), job, 102.0) is None


def test_who_did_not_come_in_time_is_named() -> None:
    job = training().job
    seen = Readoption(job, 0.0)
    assert seen.see(joined("n0"), job, 1.0) is None
    assert seen.see(joined("n1", "another"), job, 2.0) is None
    assert seen.see(Tick(), job, PATIENCE_S - 0.1) is None
    assert seen.see(Tick(), job, PATIENCE_S) == Readopted(("n0",), ("n1",), PATIENCE_S)


def test_who_is_lost_meanwhile_is_not_waited_for() -> None:
    hand = training()
    seen = Readoption(hand.job, 0.0)
    assert seen.see(joined("n0"), hand.job, 1.0) is None
    event = NodeGone("n1")
    hand.go(event)
    assert seen.see(event, hand.job, 2.0) == Readopted(("n0",), ("n1",), 2.0)


# ---------------------------------------------------------------- the backend's part


class Slow(PaperBackend):
    """Its answer about machines waits for the test, and may be an error first."""

    def __init__(self, errors: Sequence[Exception] = ()) -> None:
        super().__init__(4)
        self.may_answer, self.errors = threading.Event(), list(errors)
        self.kept: list[str] = []
        self.asked = 0

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        assert self.may_answer.wait(20.0)
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return [machine for machine in machines if machine.name in self.kept]


def until(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def hands(tmp_path: Path, backend: PaperBackend) -> tuple[Hands, Desk, JobState]:
    job = training().job
    desk = Desk(job)
    return Hands(desk, backend, Program(tmp_path, ("train",))), desk, job


MACHINES = [Machine("n0", "host-n0"), Machine("n1", "host-n1")]


def test_nobody_waits_for_a_backend_that_ends_what_is_left(tmp_path: Path) -> None:
    backend = Slow()
    made, desk, job = hands(tmp_path, backend)
    began_s = time.monotonic()
    made.adopt(MACHINES)
    made.do(EvictNode("n0", "why", block=False), job)
    assert time.monotonic() - began_s < 1.0
    assert set(made.machines) == {"n0", "n1"}, "until the backend says otherwise"
    time.sleep(0.2)
    assert not backend.evicted, "the machines are not its own yet"
    backend.kept = ["n0"]
    backend.may_answer.set()
    until(lambda: backend.evicted)
    gone = [event for event in desk.take().events if isinstance(event, NodeGone)]
    assert [event.node for event in gone] == ["n1"]
    made.close(give_back=False)


@pytest.mark.parametrize("error", [BackendError("squeue did not answer"), KeyError("a defect")])
def test_a_backend_that_fails_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(actions, "AGAIN_S", 0.05)
    backend = Slow([error])
    backend.kept = ["n0", "n1"]
    backend.may_answer.set()
    made, desk, job = hands(tmp_path, backend)
    made.adopt(MACHINES)
    made.do(EvictNode("n0", "why", block=False), job)
    until(lambda: backend.evicted)
    assert backend.asked == 2
    assert not desk.take().events
    made.close(give_back=False)


def test_a_driver_whose_machines_another_one_took_is_told(tmp_path: Path) -> None:
    backend = Slow([FencedError("another driver took the machines")])
    backend.may_answer.set()
    made, _, _ = hands(tmp_path, backend)
    made.adopt(MACHINES)
    until(lambda: made.fenced)
    made.close(give_back=False)
