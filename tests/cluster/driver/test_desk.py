"""The desk keeps nothing of answers that never come, nor of nodes that are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.cluster.driver.desk import MOST_COMMANDS, Desk
from megascale.cluster.driver.refusals import RefusedError
from megascale.cluster.job import JobState
from megascale.cluster.messages import DumpStacks, Result
from megascale.cluster.transitions import NodeGone, NodeJoined
from tests.cluster.driver.test_ladder import training


def joined(node: str, incarnation: str = "") -> NodeJoined:
    return NodeJoined(node, incarnation or f"i-{node}", f"host-{node}", "ip", epoch=1)


def answer(desk: Desk, node: str, sequence: int, incarnation: str = "") -> int:
    """How many results the deciding thread gets of it."""
    who = incarnation or f"i-{node}"
    desk.result(Result(node=node, incarnation=who, epoch=1, sequence=sequence, ok=True))
    return len(desk.take().results)


def ask(desk: Desk, node: str, job: JobState) -> int:
    """The number of the command."""
    desk.push(node, DumpStacks(ranks=[0]), job.epoch)
    return max(desk._seats[node].sent)


def test_an_answer_counts_once_and_those_that_never_come_are_forgotten() -> None:
    job = training().job
    desk = Desk(job)
    desk.seat(joined("n0"))
    first = ask(desk, "n0", job)
    assert [answer(desk, "n0", first), answer(desk, "n0", first)] == [1, 0]
    numbers = [ask(desk, "n0", job) for _ in range(10 * MOST_COMMANDS)]
    assert len(desk._seats["n0"].sent) == MOST_COMMANDS
    assert answer(desk, "n0", numbers[0]) == 0
    assert answer(desk, "n0", numbers[-MOST_COMMANDS]) == 1


def test_of_a_node_that_is_gone_nothing_is_waited_for() -> None:
    hand = training()
    desk = Desk(hand.job)
    desk.seat(joined("n1"))
    number = ask(desk, "n1", hand.job)
    desk.sync(hand.go(NodeGone("n1")).job)
    assert not desk._seats["n1"].sent
    assert not desk._seats["n1"].commands
    assert answer(desk, "n1", number) == 0
    assert not desk.refusals.counts, "it is told to leave, and no more"


def test_another_agent_does_not_answer_for_the_one_before() -> None:
    job = training().job
    desk = Desk(job)
    desk.seat(joined("n0"))
    number = ask(desk, "n0", job)
    desk.seat(joined("n0", "another"))
    assert not desk._seats["n0"].sent
    assert answer(desk, "n0", number, "another") == 0


def test_a_node_that_was_refused_gets_no_seat() -> None:
    """Its host is blocked: the job does not know it."""
    hand = training()
    job = replace(hand.job, blocked=("host-n9",))
    desk = Desk(job)
    with pytest.raises(RefusedError, match="n9 is not wanted"):
        desk.seat(joined("n9"))
    assert "n9" not in desk.silences(0.0)
