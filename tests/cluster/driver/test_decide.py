"""How a job begins, shrinks, grows, is stopped, updated and taken over; flaps and stale words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.cluster.actions import (
    Alert,
    EvictNode,
    FinishJob,
    Notify,
    Replenish,
    SelfCheck,
    StartEpoch,
    StopEpoch,
)
from megascale.cluster.decide import decide
from megascale.cluster.driver.takeover import check_same_job
from megascale.cluster.ladder import kind_of
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    CommandDone,
    CommandFailed,
    DriverRestarted,
    EvictRequested,
    HangSuspected,
    NodeGone,
    NodeHeard,
    NodeJoined,
    NodeSilent,
    RankExited,
    RanksStarted,
    Readopted,
    StepReached,
    StopRequested,
    Tick,
    UpdateRequested,
)
from megascale.errors import ConfigError
from tests.cluster.driver.jobs import ByHand, policy
from tests.cluster.driver.test_ladder import evicted, training


def test_a_job_starts_when_enough_nodes_passed_their_check() -> None:
    hand = ByHand(policy(2, spares=1))
    assert hand.all == [Replenish(2, first=True)]
    hand.go(Allocated(2, ("n0", "n1")))
    assert hand.the(Replenish) == Replenish(1), "spares are asked for apart"
    hand.go(Allocated(1, ("s0",)))
    hand.join("s0", "n1", "n0", checked=False)
    hand.go(CheckDone("n1", ok=True))
    assert hand.phase() == "checking"
    hand.go(CheckDone("n0", ok=True))
    start = hand.the(StartEpoch)
    assert [(p.node_rank, p.node) for p in start.places] == [(0, "n0"), (1, "n1")]
    assert (start.epoch, start.resume) == (1, False)
    hand.go(CheckDone("s0", ok=True))
    assert hand.state("s0") == "spare"


def test_without_self_check_a_node_is_ready_at_once() -> None:
    hand = ByHand(policy(1, selfcheck="off"))
    hand.join("n0")
    assert hand.has(StartEpoch)
    assert not any(isinstance(action, SelfCheck) for action in hand.all)


def test_a_node_that_fails_its_first_check_is_replaced() -> None:
    hand = ByHand(policy(2))
    hand.go(Allocated(2, ("n0", "n1")))
    hand.join("n0")
    hand.join("n1", checked=False)
    hand.go(CheckDone("n1", ok=False, failures=("gemm",)))
    assert evicted(hand) == {"n1": True}
    assert hand.the(Replenish).count == 1


def test_a_backend_that_has_too_few_machines_at_the_start_ends_the_job() -> None:
    hand = ByHand(policy(4))
    hand.go(Allocated(4, (), "4 machines were asked for, 2 can be given"))
    assert hand.the(FinishJob).report == "4 machines were asked for, 2 can be given"


def test_a_job_whose_nodes_never_join_ends_with_a_report() -> None:
    hand = ByHand(policy(2))
    hand.go(Allocated(2, ("n0", "n1")))
    hand.join("n0")
    hand.go(Tick(), after_s=300.0)
    assert not hand.the(FinishJob).ok
    assert "1 of 2 nodes" in hand.the(FinishJob).report


def test_all_ranks_that_end_well_end_the_job_well() -> None:
    hand = training()
    for rank in range(4):
        assert not hand.job.over
        hand.go(RankExited(rank, 0, 1))
    assert hand.the(FinishJob).ok
    assert {node.state for node in hand.job.nodes.values()} == {"leaving"}


def test_a_flap_is_reported_and_restarts_nothing() -> None:
    hand = training()
    hand.go(NodeSilent("n1", 2.9))
    assert not hand.done
    hand.go(NodeSilent("n1", 3.0))
    assert hand.state("n1") == "suspect"
    hand.go(NodeSilent("n1", 11.9))
    hand.go(NodeHeard("n1"))
    assert hand.state("n1") == "active"
    assert hand.closed() == [("silent", "flap: heard again in time")]
    assert hand.has(Notify)
    assert (hand.phase(), hand.job.epoch) == ("training", 1)


def test_a_node_is_lost_two_seconds_after_the_tolerated_flap() -> None:
    hand = training(spares=1)
    hand.go(NodeSilent("n1", 11.99))
    assert hand.phase() == "training"
    hand.go(NodeSilent("n1", 12.0))
    assert hand.phase() == "stopping"
    assert hand.closed() == [("silent", "lost")]


def test_shrink_without_a_machine_and_grow_back_at_a_saved_state() -> None:
    hand = training(4, legal_nodes=(1, 2, 4))
    hand.go(NodeGone("n1"))
    hand.stopped()
    assert hand.the(Replenish).count == 1
    assert hand.phase() == "allocating"
    hand.go(Allocated(1, ()))
    start = next(action for action in hand.done if isinstance(action, StartEpoch))
    assert [(p.node_rank, p.node) for p in start.places] == [(0, "n0"), (1, "n2")]
    assert hand.state("n3") == "spare", "3 nodes are not legal"
    assert hand.job.nodes["n3"].node_rank is None
    hand.steps(9)
    hand.join("n9")
    assert hand.the(StopEpoch).save is True
    hand.stopped()
    assert hand.places() == {0: "n0", 1: "n2", 2: "n3", 3: "n9"}
    assert hand.job.restarts == {"node_gone": 1, "grow": 1}


def test_the_place_of_a_node_that_is_silent_at_a_start_is_anothers() -> None:
    """Two nodes held one node rank, and the next start broke the driver."""
    hand = ByHand(policy(4))
    hand.train()
    hand.go(NodeGone("n0"))
    hand.stopped()
    hand.go(NodeSilent("n1", 4.0))
    hand.go(Allocated(hand.job.wanted, ()))
    assert hand.phase() == "starting"
    assert hand.job.holders == {0: "n2", 1: "n3"} == hand.places()
    hand.steps(9)
    hand.go(NodeHeard("n1"))
    assert hand.state("n1") == "spare"
    assert hand.phase() == "stopping", "it grows again"


def test_no_shrink_where_it_is_not_wanted_and_a_late_machine_helps() -> None:
    hand = training(2, shrink=False)
    hand.go(NodeGone("n1"))
    hand.stopped()
    hand.go(Allocated(1, ()))
    assert hand.phase() == "allocating"
    hand.go(Tick(), after_s=31.0)
    assert hand.the(Replenish).count == 1, "asked again"
    hand.go(Allocated(1, ("n7",)))
    hand.join("n7")
    assert hand.places() == {0: "n0", 1: "n7"}


def test_a_job_without_checkpoints_does_not_grow() -> None:
    hand = training(2, can_save=False)
    hand.go(NodeGone("n1"))
    hand.stopped()
    hand.go(Allocated(1, ()))
    assert hand.job.world_nodes == 1
    hand.steps(3)
    hand.join("n9")
    assert hand.phase() == "training"


def test_an_eviction_by_hand_saves_first() -> None:
    hand = training(spares=1)
    hand.go(EvictRequested("n0", "maintenance", block=False))
    assert hand.the(StopEpoch).save is True
    hand.stopped()
    assert evicted(hand) == {"n0": False}
    assert hand.places() == {0: "s0", 1: "n1"}
    hand.go(EvictRequested("n0", "again"))
    assert "no such node" in hand.the(Notify).text


def test_a_stop_by_hand_saves_and_ends_well() -> None:
    hand = training()
    hand.go(StopRequested())
    assert hand.the(StopEpoch).save is True
    for rank in range(4):
        hand.go(RankExited(rank, 0, 1))
    hand.stopped()
    assert hand.the(FinishJob).ok


def test_a_stop_by_hand_during_a_recovery_ends_after_it() -> None:
    hand = training()
    hand.go(RankExited(0, -9, 1, "signal", signal="SIGKILL"))
    hand.go(StopRequested("enough"))
    hand.stopped()
    assert hand.the(FinishJob).ok
    assert "enough" in hand.the(FinishJob).report


def test_a_save_that_a_fault_interrupts_is_not_waited_for() -> None:
    hand = training(spares=1)
    hand.go(EvictRequested("n0", "maintenance"))
    hand.go(RankExited(3, -11, 1, "signal", signal="SIGSEGV"))
    assert hand.the(StopEpoch).save is False
    hand.stopped()
    assert evicted(hand) == {"n0": True}
    hand.checked()
    assert hand.phase() == "starting"


def test_an_update_starts_the_next_epoch_with_the_overrides() -> None:
    hand = training()
    hand.go(UpdateRequested(("optimizer.lr=1",)))
    assert hand.the(StopEpoch).save is True
    hand.stopped()
    assert hand.the(StartEpoch).overrides == ("optimizer.lr=1",)
    hand.steps(9)
    hand.go(UpdateRequested(("optimizer.lr=2",)))
    hand.stopped()
    assert hand.the(StartEpoch).overrides == ("optimizer.lr=1", "optimizer.lr=2")


def test_updates_spend_no_budget() -> None:
    hand = training(max_restarts=0)
    hand.go(UpdateRequested(()))
    hand.stopped()
    assert hand.phase() == "starting"


def restarted(hand: ByHand) -> None:
    hand.go(DriverRestarted(hand.job.policy))


def test_a_new_driver_raises_the_epoch_and_readopts_what_trains() -> None:
    hand = training()
    restarted(hand)
    assert (hand.job.epoch, hand.job.ranks_epoch, hand.phase()) == (2, 1, "training")
    assert not hand.done
    for name, ranks in (("n0", (0, 1)), ("n1", (2, 3))):
        hand.go(NodeJoined(name, f"i-{name}", f"host-{name}", "ip", epoch=1, ranks=ranks))
        assert not hand.done
    hand.go(StepReached(1, 9))
    assert hand.job.newest_step == 9


def test_who_came_to_a_new_driver_is_in_the_state_and_in_the_report() -> None:
    hand = training()
    restarted(hand)
    assert (hand.job.num_drivers, hand.job.readopted) == (2, None)
    event = Readopted(("n0",), ("n1",), 1.25)
    hand.go(event)
    assert hand.job.readopted == event
    assert hand.the(Notify).text == "1 agents were taken over within 1.2 s, n1 did not come"
    restarted(hand)
    assert hand.job.num_drivers == 3
    for rank in range(4):
        hand.go(RankExited(rank, 0, 1))
    assert hand.the(FinishJob).report == (
        "all 4 ranks ended well (under 3 drivers, one after the other)"
    )


def test_a_node_that_comes_back_to_a_new_driver_without_its_ranks_is_a_fault() -> None:
    hand = training()
    restarted(hand)
    hand.go(NodeJoined("n1", "i-n1", "host-n1", "ip", epoch=1, ranks=(2,)))
    assert hand.phase() == "stopping"
    assert hand.opened() == ["ranks_missing"]


def test_a_new_driver_gives_the_orders_again_that_may_be_lost() -> None:
    hand = training()
    hand.go(RankExited(0, -9, 1, "signal", signal="SIGKILL"))
    restarted(hand)
    assert hand.the(StopEpoch).epoch == 2
    hand.stopped()
    restarted(hand)
    assert hand.the(SelfCheck).nodes == ("n0",)
    hand.checked()
    restarted(hand)
    assert hand.the(StopEpoch).nodes == ("n0", "n1"), "started or not: nobody knows"
    hand.stopped()
    assert hand.phase() == "starting"
    assert hand.job.epoch == 6


def test_the_time_without_a_driver_counts_against_nobody() -> None:
    """A job that waited for its machines ended at the first tick of the next driver."""
    hand = ByHand(policy(2))
    patience_s = hand.job.policy.cluster.init_deadline_s
    hand.go(Allocated(2, ("n0", "n1")))
    hand.go(NodeJoined("n0", "i-n0", "host-n0", "ip"))
    hand.go(DriverRestarted(hand.job.policy), after_s=3 * patience_s)
    hand.go(Tick())
    assert (hand.phase(), hand.state("n0"), hand.state("n1")) == ("checking", "checking", "joining")
    hand.join("n0", "n1")
    assert hand.phase() == "starting"


def test_a_new_driver_waits_as_long_as_the_first() -> None:
    hand = ByHand(policy(2))
    patience_s = hand.job.policy.cluster.init_deadline_s
    restarted(hand)
    hand.go(Tick(), after_s=patience_s - 1.0)
    assert hand.phase() == "allocating"
    hand.go(Tick())
    assert hand.the(FinishJob).report.startswith("0 of 2 nodes were ready")


def test_an_agent_that_starts_anew_costs_its_ranks_but_not_its_node() -> None:
    hand = training()
    hand.go(NodeJoined("n1", "another", "host-n1", "ip", epoch=1))
    assert hand.opened() == ["agent_died"]
    assert not evicted(hand)
    hand.go(CheckDone("n1", ok=True))
    hand.stopped()
    assert hand.places() == {0: "n0", 1: "n1"}


def test_a_journal_that_lost_its_end_takes_the_epoch_of_the_agents() -> None:
    hand = ByHand(policy(1, selfcheck="off"))
    hand.go(NodeJoined("n0", "i", "h", "ip", epoch=7, stale=True))
    assert hand.job.epoch == 8
    assert StopEpoch(7, ("n0",)) in hand.done, "whatever it runs is nobody's"


def test_a_blocked_host_is_refused_under_any_name() -> None:
    hand = training(spares=1)
    hand.go(EvictRequested("n1", "sick"))
    hand.stopped()
    hand.go(NodeJoined("n1.2", "new", "host-n1", "ip"))
    assert hand.the(EvictNode).node == "n1.2"
    assert "n1.2" not in hand.job.nodes


@pytest.mark.parametrize(
    "event",
    [
        RankExited(0, -9, 0),
        RankExited(99, -9, 1),
        StepReached(0, 99),
        StepReached(1, 5),
        RanksStarted(7),
        CommandDone("n0", "stop", 1),
        CommandFailed("n0", "start", 0, "late"),
        CommandFailed("nobody", "stop", 1, ""),
        CheckDone("n0", ok=False),
        CheckDone("nobody", ok=True),
        NodeHeard("nobody"),
        NodeSilent("nobody", 99.0),
        NodeGone("nobody"),
        Tick(),
    ],
)
def test_what_is_old_or_unknown_changes_nothing(event: object) -> None:
    hand = training()
    decision = decide(hand.job, event, hand.now_s + 1)  # type: ignore[arg-type]
    assert decision.job is hand.job
    assert decision.actions == ()


def test_a_suspicion_ends_with_the_fault_that_explains_it() -> None:
    hand = training()
    hand.go(HangSuspected((0, 1), "no progress"))
    hand.go(RankExited(3, -11, 1, "signal", signal="SIGSEGV"))
    assert hand.closed() == [("hang", "explained by incident 2")]


def test_a_shrunk_job_alerts() -> None:
    hand = training(2)
    hand.go(NodeGone("n1"))
    hand.stopped()
    hand.go(Allocated(1, (), "no machine"))
    assert any(isinstance(action, Alert) for action in hand.done)


def test_after_the_end_nothing_happens() -> None:
    hand = training()
    hand.go(StopRequested())
    hand.stopped()
    assert hand.job.over
    before = hand.job
    hand.go(NodeJoined("n5", "i", "h", "ip"))
    assert hand.job is before
    assert replace(before) == before


def test_a_stop_recovers_nothing() -> None:
    """An incident that is open when people stop the job was not healed by that."""
    hand = ByHand(policy(2))
    hand.train()
    hand.go(RankExited(1, -9, hand.job.epoch, "signal", signal="SIGKILL"))
    hand.go(StopRequested("enough"))
    hand.stopped()
    if not hand.job.over:
        hand.checked()
    assert hand.phase() == "done"
    assert [outcome for _, outcome in hand.closed()] == ["the job ended"]


def test_a_job_is_taken_over_in_its_own_shape() -> None:
    old = policy(2, 2)
    check_same_job(old, policy(2, 2, spares=1))
    with pytest.raises(ConfigError, match="of 2 nodes with 2 ranks each, this start has 1 with 4"):
        check_same_job(old, policy(1, 4))


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (3, "exited 3, its log ends: error: no prepared data", "config"),
        (3, "exited 3, its log ends: whatever", "exit"),
        (2, "exited 2 without a word", "config"),
        (7, "exited 7, its log ends: error: pip install", "config"),
        (9, "exited 9, its log ends: error: no", "exit"),
    ],
)
def test_own_errors_for_people_are_no_fault_of_a_node(code: int, message: str, kind: str) -> None:
    assert kind_of("exit", code, message) == kind
