"""Any order of events: no exception, and the invariants of `cluster/job.py` hold after each.

Mutations that it was seen to catch: a spare that keeps its node rank after a shrink, incidents that
the end of the job leaves open, an epoch that a late join sets back, a lost node that is waited for.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pydantic import TypeAdapter

from megascale.cluster.actions import Closed, FinishJob, Opened, StartEpoch
from megascale.cluster.job import JobState
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    CommandDone,
    CommandFailed,
    DriverRestarted,
    Event,
    EvictRequested,
    Found,
    HangSuspected,
    HardwareSeen,
    NodeGone,
    NodeHeard,
    NodeJoined,
    NodeSilent,
    RankExited,
    RanksStarted,
    StepReached,
    StopRequested,
    Tick,
    UpdateRequested,
)
from megascale.telemetry.diagnose.finding import Finding
from tests.cluster.driver.jobs import ByHand, policy
from tests.cluster.driver.test_ledger import total_ns

NAMES = st.sampled_from(["n0", "n1", "n2", "n3", "s0", "s1", "n0.2"])
RANKS = st.integers(0, 9)
EPOCHS = st.integers(-2, 2)  # beside the present one
KINDS = st.sampled_from(
    ["exception", "signal", "signal", "exit", "out_of_memory", "network", "numerical", "device"]
)
FINDINGS = st.builds(
    Finding,
    st.sampled_from(["hang", "straggler", "nonfinite", "replicas_differ", "traffic"]),
    st.lists(RANKS, max_size=4, unique=True).map(tuple),
    st.just({"agreed_step": 3}),
    st.none() | st.integers(0, 20),
    st.none(),
    st.booleans(),
)


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        nodes=st.sampled_from([4, 2, 4, 3, 1]),
        spares=st.integers(0, 2),
        check=st.sampled_from(["off", "light"]),
        shrink=st.sampled_from([True, True, False]),
        can_save=st.booleans(),
        trains=st.sampled_from([True, True, False]),
    )
    def begin(
        self, nodes: int, spares: int, check: str, shrink: bool, can_save: bool, trains: bool
    ) -> None:
        chosen = policy(
            nodes,
            2,
            spares=spares,
            selfcheck=check,
            shrink=shrink,
            can_save=can_save,
            legal_nodes=(1, 2, 4),
        )
        self.chosen, self.trains = chosen, trains
        self.again()

    def again(self) -> None:
        """A new job: most orders of events end one soon."""
        self.hand = ByHand(self.chosen)
        self.epoch = 0
        self.opened: set[int] = set()
        self.closed: set[int] = set()
        self.finished = 0
        if self.trains:
            self.the_backend_answers(4)
            self.everybody_joins()
            self.a_step(3)

    def go(self, event: Event, after_s: float = 0.5) -> None:
        if self.hand.job.over:
            self.again()
        decision = self.hand.go(event, after_s)
        for action in decision.actions:
            if isinstance(action, Opened):
                assert action.incident.number not in self.opened, action
                self.opened.add(action.incident.number)
            if isinstance(action, Closed):
                assert action.incident.number in self.opened, action
                assert action.incident.number not in self.closed, f"closed twice: {action}"
                self.closed.add(action.incident.number)
            if isinstance(action, StartEpoch):
                places = [place.node_rank for place in action.places]
                assert places == list(range(len(places))), action
                assert len({place.node for place in action.places}) == len(places), action
            self.finished += isinstance(action, FinishJob)

    # ------------------------------------------------------------ the way it usually goes

    @rule()
    def everybody_joins(self) -> None:
        for number in range(self.hand.job.policy.num_nodes):
            self.go(NodeJoined(f"n{number}", f"i{number}", f"h{number}", "ip"))
            self.go(CheckDone(f"n{number}", ok=True))

    @rule()
    def everybody_stops(self) -> None:
        if self.hand.job.recovery is not None:
            for name in sorted(self.hand.job.recovery.waiting):
                self.go(CommandDone(name, "stop", self.hand.job.epoch))

    @rule(ok=st.booleans())
    def checks_end(self, ok: bool) -> None:
        for node in self.hand.job.in_state("checking"):
            self.go(CheckDone(node.name, ok, () if ok else ("memory",)))

    @rule(count=st.integers(0, 3))
    def the_backend_answers(self, count: int) -> None:
        wanted = self.hand.job.wanted
        self.go(Allocated(wanted, tuple(f"n{i}" for i in range(min(count, wanted)))))

    @rule(step=st.integers(1, 20))
    def a_step(self, step: int) -> None:
        if self.hand.job.ranks_epoch is not None:
            self.go(RanksStarted(self.hand.job.ranks_epoch))
            self.go(StepReached(self.hand.job.ranks_epoch, step, saved_s=0.1))

    @rule(data=st.data())
    def a_node_is_lost_and_none_comes(self, data: st.DataObject) -> None:
        held = sorted(self.hand.job.holders.values())
        if held:
            self.go(NodeGone(data.draw(st.sampled_from(held))))
            self.everybody_stops()
            self.checks_end(ok=True)
            self.go(Allocated(self.hand.job.wanted, ()))

    # ------------------------------------------------------------ whatever else may come

    @rule(name=NAMES, incarnation=st.integers(0, 2), epoch=EPOCHS, ranks=st.lists(RANKS))
    def joins(self, name: str, incarnation: int, epoch: int, ranks: list[int]) -> None:
        epoch = max(0, self.hand.job.epoch + epoch)
        self.go(NodeJoined(name, str(incarnation), name, "ip", None, epoch, tuple(ranks)))

    @rule(name=NAMES, silence_s=st.sampled_from([1.0, 4.0, 12.0]))
    def silent(self, name: str, silence_s: float) -> None:
        self.go(NodeSilent(name, silence_s))

    @rule(name=NAMES, heard=st.booleans())
    def heard_or_gone(self, name: str, heard: bool) -> None:
        self.go(NodeHeard(name) if heard else NodeGone(name))

    @rule(rank=RANKS, code=st.sampled_from([0, 1, 6, -9, -9, -11]), epoch=EPOCHS, kind=KINDS)
    def exits(self, rank: int, code: int, epoch: int, kind: str) -> None:
        self.go(RankExited(rank, code, (self.hand.job.ranks_epoch or 0) + epoch, kind, "what"))

    @rule(missing=st.integers(0, 2))
    def all_exit_but(self, missing: int) -> None:
        job = self.hand.job
        for rank in range(job.world_size - missing):
            self.go(RankExited(rank, 0, job.ranks_epoch or 0))

    @rule(finding=FINDINGS)
    def found(self, finding: Finding) -> None:
        self.go(Found(finding))

    @rule(ranks=st.lists(RANKS, min_size=1, max_size=3))
    def suspected(self, ranks: list[int]) -> None:
        self.go(HangSuspected(tuple(ranks), "slow"))

    @rule(name=NAMES, kind=st.sampled_from(["xid", "nic_eth0"]), certain=st.booleans())
    def hardware(self, name: str, kind: str, certain: bool) -> None:
        self.go(HardwareSeen(name, kind, "", certain))

    @rule(name=NAMES, order=st.sampled_from(["start", "stop", "selfcheck"]), epoch=EPOCHS)
    def command_fails(self, name: str, order: str, epoch: int) -> None:
        self.go(CommandFailed(name, order, self.hand.job.epoch + epoch, "why"))

    @rule(name=NAMES, block=st.booleans())
    def evict(self, name: str, block: bool) -> None:
        self.go(EvictRequested(name, "by hand", block))

    @rule(what=st.integers(0, 5))
    def people(self, what: int) -> None:
        self.go(StopRequested() if what == 0 else UpdateRequested(("a.b=1",)))

    @rule(after_s=st.sampled_from([1.0, 1.0, 31.0, 700.0]))
    def time_passes(self, after_s: float) -> None:
        self.go(Tick(), after_s)

    @rule()
    def the_driver_starts_again(self) -> None:
        stored = TypeAdapter(JobState).dump_json(self.hand.job)
        assert TypeAdapter(JobState).validate_json(stored) == self.hand.job
        self.go(DriverRestarted(self.hand.job.policy))

    # ------------------------------------------------------------ invariants

    @invariant()
    def the_epoch_never_falls(self) -> None:
        if hasattr(self, "hand"):
            assert self.hand.job.epoch >= self.epoch
            self.epoch = self.hand.job.epoch
            assert self.hand.job.ranks_epoch is None or self.hand.job.ranks_epoch <= self.epoch

    @invariant()
    def no_two_nodes_have_one_node_rank(self) -> None:
        if hasattr(self, "hand"):
            held = [n.node_rank for n in self.hand.job.nodes.values() if n.node_rank is not None]
            assert len(held) == len(set(held)), self.hand.job.nodes

    @invariant()
    def one_open_incident_a_cause_and_each_is_closed_once(self) -> None:
        if hasattr(self, "hand"):
            job = self.hand.job
            causes = [incident.cause for incident in job.open]
            assert len(causes) == len(set(causes)), causes
            assert {one.number for one in job.open} == self.opened - self.closed
            assert not job.over or not job.open
            assert self.finished == job.over

    @invariant()
    def the_ledger_sums_to_what_was_booked(self) -> None:
        if hasattr(self, "hand"):
            ledger = self.hand.job.ledger
            assert total_ns(ledger) == ledger.wall_ns
            assert ledger.marked_ns <= round(self.hand.now_s * 1e9)

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """A job that is stopping waits for somebody, one that diagnoses for a check."""
        if hasattr(self, "hand"):
            job = self.hand.job
            if job.phase == "stopping":
                assert job.recovery is not None
                assert job.recovery.waiting
                assert job.recovery.waiting <= set(job.holders.values()), job.recovery.waiting
            if job.phase == "diagnosing":
                held = [job.nodes[name].state for name in job.holders.values()]
                assert "checking" in held or "suspect" in held, held
            if job.phase in ("starting", "training"):
                assert sorted(job.holders) == list(range(job.world_nodes))


AnyOrder.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = pytest.mark.full(AnyOrder.TestCase)
