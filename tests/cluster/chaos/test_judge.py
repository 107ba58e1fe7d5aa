"""A line of the table from a journal that a job driven by hand has written: right, and wrong."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.chaos.faults import KINDS
from megascale.cluster.chaos.inject import Hit
from megascale.cluster.chaos.judge import Line, Story, tell
from megascale.cluster.chaos.observe import Journal, Turn
from megascale.cluster.chaos.run import spoilt
from megascale.cluster.driver import journal as journals
from megascale.cluster.transitions import (
    CheckDone,
    CommandDone,
    EvictRequested,
    NodeGone,
    NodeHeard,
    NodeSilent,
    RankExited,
    RanksStarted,
    StepReached,
    StopRequested,
)
from tests.cluster.driver.jobs import ByHand, policy


class Watched:
    """A job by hand whose decisions go into a journal; `turns` as chaos reads them.

    Its clock in place of the machine's: a row's moment is the job's.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.hand = ByHand(policy(spares=1, **changes))
        self.hand.train()
        self.journal = journals.Journal(folder / "journal.sqlite")
        monkeypatch.setattr(time, "monotonic", lambda: self.hand.now_s)
        self.journal.begin(self.hand.decision, self.hand.now_s)

    def go(self, event: Any, after_s: float = 1.0) -> None:
        decision = self.hand.go(event, after_s)
        self.journal.append([(event, decision, self.hand.now_s)])

    def turns(self) -> list[Turn]:
        read = Journal(self.journal.path)
        read.read()
        return read.turns


def _judge(kind: str, hit: Hit, turns: list[Turn], until_s: float = float("inf")) -> Line:
    line = Line(1, kind, "", 0.0)
    return tell(line, Story.since(KINDS[kind], hit, turns, until_s))


def _killed(job: Watched, rank: int) -> Hit:
    hand = job.hand
    hand.now_s += 1.0  # a fault is not in the moment of a decision
    hit = Hit(hand.now_s, rank, hand.job.holders[rank // 2])
    epoch = hand.job.epoch
    job.go(RankExited(rank, -9, epoch, kind="signal", signal="SIGKILL", message="killed"), 0.5)
    for node in list(hand.job.holders.values()):
        job.go(CommandDone(node, "stop", epoch), 0.1)
    return hit


def _resumed(job: Watched) -> None:
    for node in [n.name for n in job.hand.job.in_state("checking")]:
        job.go(CheckDone(node, ok=True), 2.0)
    epoch = job.hand.job.epoch
    job.go(RanksStarted(epoch), 3.0)
    newest = job.hand.job.newest_step
    job.go(StepReached(epoch, max(1, newest)), 1.0)
    job.go(StepReached(epoch, newest + 1), 1.0)


def test_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Watched(tmp_path, monkeypatch)
    hit = _killed(job, 2)
    assert not Story.since(KINDS["kill"], hit, job.turns()).is_over(job.hand.now_s)
    _resumed(job)
    assert Story.since(KINDS["kill"], hit, job.turns()).is_over(job.hand.now_s)
    line = _judge("kill", hit, job.turns())
    assert line.wrong == ""
    assert (line.noticed_s, line.decided_s, line.started_s) == (0.5, 0.5, line.checked_s)
    assert line.named_s == 0.5, "when it was said, not when all had stopped"
    assert line.new_s == pytest.approx((line.started_s or 0.0) + 5.0)
    assert line.first_s == pytest.approx((line.started_s or 0.0) + 4.0)
    assert (line.cause, line.right, line.restarts) == ("signal", True, 1)
    assert line.closing.startswith("recovered")
    assert line.lost_steps == 0, "nothing was done twice"
    assert asdict(line)["named"] == f"rank 2 on {hit.node}"


def test_what_would_be_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Watched(tmp_path, monkeypatch)
    hit = _killed(job, 2)
    open_still = _judge("kill", hit, job.turns())
    assert open_still.lost_steps is None
    assert "closed 0 times" in open_still.wrong
    assert "no new step" in open_still.wrong
    _resumed(job)
    another = _judge("kill", Hit(hit.at_s, 3, hit.node), job.turns())
    assert another.right is False
    assert "must be rank 3" in another.wrong
    assert "cause signal, must be hang" in _judge("gil", hit, job.turns()).wrong
    assert "an incident was opened: signal" in _judge("fuzz", hit, job.turns()).wrong
    assert "restarts, must be none" in _judge("fuzz", hit, job.turns()).wrong
    assert "did not end with a report" in _judge("exception", hit, job.turns()).wrong


def test_a_program_that_is_wrong_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Watched(tmp_path, monkeypatch)
    hit, epoch = Hit(job.hand.now_s, 1, job.hand.job.holders[0]), job.hand.job.epoch
    job.go(RankExited(1, 1, epoch, kind="exception", message="ValueError: no"))
    for node in list(job.hand.job.holders.values()):
        job.go(CommandDone(node, "stop", epoch))
    line = _judge("exception", hit, job.turns())
    assert line.wrong == ""
    assert line.closing == "the job ended"


def test_a_flap_of_a_busy_machine_is_counted_and_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Watched(tmp_path, monkeypatch)
    hit = Hit(job.hand.now_s)
    node = job.hand.job.holders[0]
    job.go(NodeSilent(node, 3.5))
    job.go(NodeHeard(node))
    line = _judge("fuzz", hit, job.turns())
    assert (line.wrong, line.flaps) == ("", 1)
    flap = _judge("unplugged", Hit(hit.at_s, node=node), job.turns())
    assert (flap.wrong, flap.cause, flap.right) == ("", "silent", True)
    assert flap.suspect_s == 1.0
    other = _judge("unplugged", Hit(hit.at_s, node="another"), job.turns())
    assert "must be node another" in other.wrong


def test_a_spare_that_goes_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Watched(tmp_path, monkeypatch)
    spare = job.hand.job.in_state("spare")[0].name
    hit = Hit(job.hand.now_s, node=spare)
    job.go(NodeGone(spare, "gone"))
    line = _judge("spare_kill", hit, job.turns())
    assert (line.wrong, line.decided_s, line.restarts) == ("", 1.0, 0)


def test_a_fault_ends_where_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Watched(tmp_path, monkeypatch)
    first = _killed(job, 2)
    _resumed(job)
    second = _killed(job, 1)
    _resumed(job)
    turns = job.turns()
    line = _judge("kill", first, turns, second.at_s)
    assert (line.wrong, line.restarts, line.right) == ("", 1, True)
    assert _judge("kill", second, turns).right


def test_the_stop_at_the_end_is_no_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Watched(tmp_path, monkeypatch)
    hit = Hit(job.hand.now_s)
    job.go(StopRequested("the schedule is over"))
    assert _judge("fuzz", hit, job.turns()).decided_s is None
    assert Story.since(KINDS["kill"], hit, job.turns()).decided() is None
    job.go(EvictRequested(job.hand.job.holders[0], "no"))


def test_steps_that_were_computed_wrong_are_those_done_again() -> None:
    jump = Line(1, "loss_spike", "rank 2", 0.0, step=16, lost_steps=4)
    flip = Line(2, "bit_flip", "rank 3", 9.0, step=40)
    kill = Line(3, "kill", "rank 1", 20.0, step=60, lost_steps=1)
    assert spoilt([jump, flip, kill]) == {16, 17, 18, 19, 40}
