"""Spares that leave while ranks train are replaced, without a restart and without a storm."""

from __future__ import annotations

import pytest

from megascale.cluster.actions import Replenish
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    DriverRestarted,
    Event,
    EvictRequested,
    HardwareSeen,
    NodeGone,
    NodeJoined,
    NodeSilent,
    Tick,
)
from tests.cluster.driver.test_ladder import evicted, training


def test_a_silent_spare_is_replaced_and_nobody_restarts() -> None:
    hand = training(spares=1)
    hand.go(NodeSilent("s0", 12.0))
    assert hand.phase() == "training"
    assert evicted(hand) == {"s0": False}
    assert hand.the(Replenish) == Replenish(1)
    hand.go(Allocated(1, ("s1",)))
    hand.join("s1")
    assert (hand.state("s1"), hand.phase(), hand.job.epoch) == ("spare", "training", 1)


@pytest.mark.parametrize(
    "event",
    [
        NodeGone("s0"),
        EvictRequested("s0", "maintenance", block=False),
        HardwareSeen("s0", "xid", "79"),
    ],
)
def test_a_spare_that_leaves_is_replaced_while_ranks_train(event: Event) -> None:
    hand = training(spares=1)
    hand.go(event)
    assert hand.the(Replenish) == Replenish(1)
    hand.go(event)
    assert not hand.has(Replenish), "once"
    hand.go(Allocated(1, (), "no machine"))
    hand.go(Tick(), after_s=31.0)
    assert hand.the(Replenish) == Replenish(1), "asked again where there was none"


def test_a_spare_that_fails_its_check_is_replaced() -> None:
    hand = training(spares=1)
    hand.go(NodeGone("s0"))
    hand.go(Allocated(1, ("s1",)))
    hand.join("s1", checked=False)
    hand.go(CheckDone("s1", ok=False, failures=("gemm",)))
    assert hand.the(Replenish) == Replenish(1)
    assert hand.phase() == "training"


def test_a_machine_whose_agent_never_comes_is_not_replaced_at_once() -> None:
    hand = training(spares=1)
    hand.go(NodeGone("s0"))
    hand.go(Allocated(1, ("s1",)))
    hand.go(NodeGone("s1"))
    assert not hand.has(Replenish), "its successor would fare alike"
    hand.go(Tick(), after_s=31.0)
    assert hand.the(Replenish) == Replenish(1)


def test_a_spare_whose_agent_starts_anew_is_itself_its_replacement() -> None:
    hand = training(spares=1)
    hand.go(NodeJoined("s0", "another", "host-s0", "ip", epoch=1))
    assert not hand.has(Replenish)
    assert not evicted(hand)
    hand.go(CheckDone("s0", ok=True))
    assert hand.state("s0") == "spare"


def test_a_new_driver_asks_again_for_a_spare_whose_answer_is_lost() -> None:
    hand = training(spares=1)
    hand.go(NodeGone("s0"))
    hand.go(DriverRestarted(hand.job.policy))
    assert hand.the(Replenish) == Replenish(1)
