"""Each rung of the decision ladder, from a training job to what is done about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megascale.cluster.actions import (
    Alert,
    DumpStacks,
    EvictNode,
    FinishJob,
    Replenish,
    SelfCheck,
    StartEpoch,
    StopEpoch,
)
from megascale.cluster.job import KEPT_FAULTS
from megascale.cluster.ladder import kind_of
from megascale.cluster.transitions import (
    CommandFailed,
    Found,
    HangSuspected,
    HardwareSeen,
    NodeGone,
    NodeSilent,
    RankExited,
    StepReached,
    Tick,
)
from megascale.telemetry.diagnose.finding import Finding
from tests.cluster.driver.jobs import ByHand, policy


def training(nodes: int = 2, step: int = 5, **changes: Any) -> ByHand:
    hand = ByHand(policy(nodes, **changes))
    hand.train(step)
    return hand


def exits(hand: ByHand, rank: int = 1, code: int = -9, **more: Any) -> RankExited:
    assert hand.job.ranks_epoch is not None
    return RankExited(rank, code, hand.job.ranks_epoch, **more)


def evicted(hand: ByHand) -> dict[str, bool]:
    """Nodes and whether their hosts were blocked, over the whole job."""
    return {one.node: one.block for one in hand.all if isinstance(one, EvictNode)}


@pytest.mark.parametrize("kind", ["xid", "ecc_uncorrected", "device_lost", "unkillable"])
def test_clear_hardware_evicts_at_once_and_blocks_the_host(kind: str) -> None:
    hand = training(spares=1)
    hand.go(HardwareSeen("n1", kind, "GPU 0"))
    assert hand.the(StopEpoch).save is False
    hand.stopped()
    assert evicted(hand) == {"n1": True}
    assert not any(isinstance(one, SelfCheck) and "n1" in one.nodes for one in hand.done)
    assert hand.places() == {0: "n0", 1: "s0"}, "the spare takes the lost node's ranks"
    assert hand.job.blocked == ("host-n1",)


def test_of_a_process_that_does_not_end_its_rank_is_named() -> None:
    hand = training(spares=1)
    hand.go(HardwareSeen("n1", "unkillable", "rank 3 (pid 7): does not end", ranks=(3,)))
    assert [one.ranks for one in hand.job.open] == [(3,)]
    hand.stopped()
    assert evicted(hand) == {"n1": True}


def test_hardware_wins_over_the_exceptions_that_it_causes() -> None:
    hand = training(spares=1)
    hand.go(exits(hand, 2, 1, kind="exception", message="CUDA error: an illegal address"))
    hand.go(HardwareSeen("n1", "xid", "GPU 0: Xid 79"))
    hand.stopped()
    assert evicted(hand) == {"n1": True}
    assert hand.phase() == "starting"


def test_a_network_alert_counts_only_twice_in_five_minutes() -> None:
    hand = training(spares=1)
    hand.go(HardwareSeen("n1", "nic_eth0", "down", certain=False))
    assert hand.names() == ["Opened", "Alert"]
    hand.go(Tick(), after_s=301.0)
    assert hand.closed() == [("nic_eth0", "did not happen again")]
    hand.go(HardwareSeen("n1", "nic_eth0", "down", certain=False))
    assert hand.phase() == "training"
    hand.go(HardwareSeen("n1", "nic_eth0", "down", certain=False), after_s=299.0)
    hand.stopped()
    assert evicted(hand) == {"n1": True}


def test_two_nodes_with_one_alert_each_are_not_evicted() -> None:
    hand = training()
    hand.go(HardwareSeen("n0", "nic_eth0", "down", certain=False))
    hand.go(HardwareSeen("n1", "nic_eth0", "down", certain=False))
    assert hand.phase() == "training"
    assert not evicted(hand)


@pytest.mark.parametrize(("code", "kind"), [(1, "exception"), (2, "exception"), (3, "exception")])
def test_a_user_error_stops_with_the_first_error(code: int, kind: str) -> None:
    hand = training(spares=1)
    hand.go(exits(hand, 3, code, kind=kind, message="IndexError: list index out of range"))
    hand.go(exits(hand, 0, 1, kind="exception", message="gloo: connection closed by peer"))
    hand.stopped()
    finish = hand.the(FinishJob)
    assert (finish.ok, finish.exit_code) == (False, code)
    assert "rank 3" in finish.report
    assert "IndexError" in finish.report
    assert not evicted(hand)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_killed_rank_is_checked_and_restarted_on_the_same_node(name: str) -> None:
    hand = training(spares=1)
    hand.go(exits(hand, 2, -9, kind="signal", signal=name))
    hand.stopped()
    assert hand.the(SelfCheck).nodes == ("n1",)
    hand.checked()
    assert hand.the(StartEpoch).resume
    assert hand.places() == {0: "n0", 1: "n1"}
    assert not evicted(hand)


def test_a_node_that_fails_the_check_after_a_fault_is_replaced() -> None:
    hand = training(spares=1)
    hand.go(exits(hand, 2, -9, kind="signal", signal="SIGKILL"))
    hand.stopped()
    hand.checked(ok=False)
    assert evicted(hand) == {"n1": True}
    assert hand.places() == {0: "n0", 1: "s0"}


def test_a_rank_that_misses_a_peer_is_not_the_news() -> None:
    hand = training(spares=1)
    hand.go(exits(hand, 0, 1, kind="exception", message="Connection closed by peer [127.0.0.1]"))
    assert hand.opened() == ["network"]
    hand.go(exits(hand, 3, -11, kind="signal", signal="SIGSEGV"))
    hand.stopped()
    assert hand.the(SelfCheck).nodes == ("n1",)
    assert hand.job.incident("signal") is not None, "renamed"
    assert hand.job.faults[-1].ranks == (3,)


@pytest.mark.parametrize("kind", ["out_of_memory", "network"])
def test_of_thousands_of_errors_the_first_is_kept(kind: str) -> None:
    hand = training(nodes=100)
    hand.go(exits(hand, 7, 1, kind=kind, message="the first"), 0.0)
    for rank in (rank for rank in range(200) if rank != 7):
        hand.go(exits(hand, rank, 1, kind="network", message=f"{rank}"), 0.0)
    assert hand.job.recovery is not None
    assert len(hand.job.recovery.faults) == KEPT_FAULTS, "and no more than can be kept"
    hand.stopped()
    assert (hand.job.faults[-1].ranks, hand.job.faults[-1].text) == ((7,), "the first")


def test_lost_peers_without_a_cause_have_every_node_checked() -> None:
    hand = training()
    hand.go(exits(hand, 0, 1, kind="exception", message="Connection reset by peer"))
    hand.stopped()
    assert hand.the(SelfCheck).nodes == ("n0", "n1")


@pytest.mark.parametrize("kind", ["out_of_memory", "disk_full"])
def test_exhaustion_restarts_once_then_stops(kind: str) -> None:
    hand = training()
    hand.go(exits(hand, 1, -9, kind=kind, message="oom", step=5))
    hand.stopped()
    assert hand.has(StartEpoch)
    hand.steps(9)
    hand.go(exits(hand, 2, -9, kind=kind, message="oom", step=10))
    hand.stopped()
    assert not hand.the(FinishJob).ok
    assert kind in hand.the(FinishJob).report
    assert not evicted(hand)


def hang(hand: ByHand, *ranks: int, step: int = 6, certain: bool = True) -> None:
    hand.go(HangSuspected(tuple(range(hand.job.world_size)), "no progress", step))
    assert hand.the(DumpStacks).ranks == tuple(range(hand.job.world_size))
    hand.go(Found(Finding("hang", ranks, {"rule": "stack"}, step, "tensor", certain)))
    assert hand.the(StopEpoch).save is False
    hand.stopped()


def test_a_hang_evicts_the_second_time_although_the_check_passes() -> None:
    hand = training(spares=1)
    hang(hand, 2)
    assert hand.the(SelfCheck).nodes == ("n1",)
    hand.checked()
    assert hand.places() == {0: "n0", 1: "n1"}
    assert not evicted(hand)
    hand.steps(20)
    hang(hand, 3, step=21)
    assert evicted(hand) == {"n1": True}
    assert hand.places() == {0: "n0", 1: "s0"}


def test_a_hang_whose_suspect_fails_the_check_evicts_it() -> None:
    hand = training(spares=1)
    hang(hand, 0)
    hand.checked(ok=False)
    assert evicted(hand) == {"n0": True}
    assert hand.places() == {0: "s0", 1: "n1"}


def test_a_hang_of_every_node_evicts_nobody() -> None:
    hand = training()
    hang(hand, 0, 1, 2, 3)
    assert hand.the(SelfCheck).nodes == ("n0", "n1")
    hand.checked()
    assert not evicted(hand)
    assert hand.phase() == "starting"


def test_a_suspicion_that_passes_is_closed_and_nothing_restarts() -> None:
    hand = training()
    hand.go(HangSuspected((0,), "no progress", 6))
    hand.go(StepReached(1, 6))
    assert hand.closed() == [("hang", "passed: step 6 was reached")]
    hand.go(Found(Finding("hang", (0,))))
    assert hand.phase() == "training"
    assert hand.job.suspicion is None


def test_a_suspicion_that_nobody_explains_counts_as_it_is() -> None:
    hand = training()
    hand.go(HangSuspected((2,), "no progress", 6))
    hand.go(Tick(), after_s=29.0)
    assert hand.phase() == "training"
    hand.go(Tick(), after_s=2.0)
    assert hand.phase() == "stopping"


def test_a_straggler_is_evicted_at_a_saved_state() -> None:
    hand = training(spares=1)
    hand.go(Found(Finding("straggler", (2,), {"slower": 0.2})))
    assert hand.the(StopEpoch).save is True
    hand.stopped()
    assert evicted(hand) == {"n1": True}
    assert hand.places() == {0: "n0", 1: "s0"}


def test_a_straggler_stays_while_nobody_can_take_its_place() -> None:
    hand = training()
    hand.go(Found(Finding("straggler", (2,), {"slower": 0.2})))
    assert hand.phase() == "training"
    assert hand.has(Alert)
    assert hand.the(Replenish).count == 1


def test_what_is_not_finite_is_retried_then_rolled_back_then_reported() -> None:
    hand = training()
    found = Found(Finding("nonfinite", (1,), {"parameter": "w"}, step=7))
    hand.go(found)
    hand.stopped()
    hand.checked()
    assert (hand.the(StartEpoch).back, hand.phase()) == (0, "starting")
    hand.steps(6)
    hand.go(found)
    hand.stopped()
    assert hand.the(StartEpoch).back == 1
    hand.steps(6)
    hand.go(found)
    hand.stopped()
    assert not hand.the(FinishJob).ok
    assert "older state" in hand.the(FinishJob).report


def test_replicas_that_differ_evict_the_minority_and_go_back_to_where_they_agreed() -> None:
    hand = training(3, spares=1)
    hand.go(Found(Finding("replicas_differ", (4, 5), {"agreed_step": 4}, step=5)))
    assert hand.the(StopEpoch).save is False, "the state is not to be saved"
    hand.stopped()
    assert evicted(hand) == {"n2": True}
    assert hand.the(StartEpoch).newest_step == 4


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_same_fault_at_the_same_step_stops_with_a_report(limit: int) -> None:
    hand = training(max_same_fault=limit)
    for number in range(1, limit + 1):
        hand.go(exits(hand, 1, -11, kind="signal", signal="SIGSEGV", step=6))
        hand.stopped()
        if number < limit:
            hand.checked()
            hand.steps(5)
    assert not hand.the(FinishJob).ok
    assert f"{limit} times" in hand.the(FinishJob).report


def test_the_same_fault_at_other_steps_does_not_stop() -> None:
    hand = training(max_same_fault=2)
    for step in (6, 7, 8):
        hand.go(exits(hand, 1, -11, kind="signal", signal="SIGSEGV", step=step))
        hand.stopped()
        hand.checked()
        hand.steps(step)
    assert hand.phase() == "training"


@pytest.mark.parametrize("how", [NodeSilent("n1", 12.1), NodeGone("n1", "preempted")])
def test_a_lost_node_is_replaced_by_the_spare(how: NodeSilent | NodeGone) -> None:
    hand = training(spares=1)
    hand.go(how)
    assert hand.the(StopEpoch).nodes == ("n0",), "who is lost is not waited for"
    assert evicted(hand) == {"n1": False}
    hand.stopped()
    assert hand.places() == {0: "n0", 1: "s0"}
    assert hand.the(Replenish).count == 1, "the pool of spares is filled up"


def test_a_jump_of_the_loss_goes_back_to_before_it_and_its_alert_ends_with_that() -> None:
    hand = training()
    hand.steps(9)
    jump = Finding("loss_spike", (), {"agreed_step": 7}, step=8, group="world", certain=False)
    hand.go(Found(jump))
    (alert,) = hand.job.open
    assert alert.ends == "quiet"
    hand.go(Found(replace(jump, step=9, certain=True)))
    assert [one.number for one in hand.job.open] == [alert.number]
    hand.go(Found(jump))  # said once more: it ends with the act all the same
    assert [(one.ends, one.quiet_after_s) for one in hand.job.open] == [("step", None)]
    hand.stopped()
    hand.checked()
    assert hand.the(StartEpoch).newest_step == 7
    hand.steps(8)
    assert not hand.job.open, "closed by the first step of the next epoch"


def test_budgets_a_cause_and_in_all() -> None:
    for changes in ({"max_restarts_a_cause": 2}, {"max_restarts": 2}):
        hand = training(**changes)
        for step in (6, 7):
            hand.go(exits(hand, 1, -11, kind="signal", signal="SIGSEGV", step=step))
            hand.stopped()
            hand.checked()
            hand.steps(step)
        hand.go(exits(hand, 1, -11, kind="signal", signal="SIGSEGV", step=9))
        hand.stopped()
        hand.checked()
        assert "2 restarts" in hand.the(FinishJob).report
        assert not hand.the(FinishJob).ok


def test_a_node_that_cannot_end_its_ranks_is_condemned() -> None:
    hand = training(spares=1)
    hand.go(exits(hand, 0, -9, kind="signal", signal="SIGKILL"))
    hand.go(CommandFailed("n1", "stop", hand.job.epoch, "unkillable: rank 2 (pid 7)"))
    assert evicted(hand) == {"n1": True}
    hand.stopped()
    hand.checked()
    assert hand.places() == {0: "n0", 1: "s0"}


def test_a_node_that_does_not_answer_a_stop_is_condemned_at_the_deadline() -> None:
    hand = training(spares=1)
    hand.go(exits(hand, 0, -9, kind="signal", signal="SIGKILL"))
    hand.go(Tick(), after_s=10.0)
    assert not evicted(hand)
    hand.go(Tick(), after_s=15.0)
    assert evicted(hand) == {"n0": True, "n1": True}


@pytest.mark.parametrize(
    ("kind", "code", "message", "meant"),
    [
        ("exception", 1, "ValueError: x", "exception"),
        ("exception", 2, "no such key", "config"),
        ("exception", 5, "peers did not arrive", "launch"),
        ("exception", 6, "not finite", "numerical"),
        ("exception", 1, "[gloo] Timed out waiting 5000ms for recv", "network"),
        ("exception", 1, "Connection reset by peer", "network"),
        ("exit", 7, "", "exit"),
        ("something_new", 1, "", "exit"),
        ("out_of_memory", -9, "", "out_of_memory"),
    ],
)
def test_the_kind_of_an_exit(kind: str, code: int, message: str, meant: str) -> None:
    assert kind_of(kind, code, message) == meant
