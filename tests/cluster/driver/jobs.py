"""A job driven by hand: events in, actions out, on a clock that the test moves."""

from __future__ import annotations

from typing import Any, TypeVar

from megascale.cluster.actions import Action, Closed, Opened, StartEpoch
from megascale.cluster.decide import Decision, begin, decide
from megascale.cluster.driver.reading import Readings
from megascale.cluster.job import JobState
from megascale.cluster.transitions import (
    Allocated,
    CheckDone,
    CommandDone,
    Event,
    NodeJoined,
    Policy,
    RanksStarted,
    StepReached,
)
from megascale.config.cluster import ClusterConfig

_Action = TypeVar("_Action", bound=Action)


def at_once() -> Readings:
    """Files are read where it is asked for."""
    return Readings(lambda work: work())


def policy(nodes: int = 2, procs: int = 2, **changes: Any) -> Policy:
    spares = changes.pop("spares", 0)
    legal = changes.pop("legal_nodes", tuple(range(1, nodes + 1)))
    can_save = changes.pop("can_save", True)
    config = ClusterConfig(**{"selfcheck": "light", **changes})
    return Policy(nodes, procs, config, spares, legal, can_save)


class ByHand:
    """`go` makes an event happen a second later; `done` are the actions of the last one."""

    def __init__(self, chosen: Policy) -> None:
        self.now_s = 0.0
        self.decision: Decision = begin(chosen, 0.0)
        self.all: list[Action] = list(self.decision.actions)

    @property
    def job(self) -> JobState:
        return self.decision.job

    @property
    def done(self) -> tuple[Action, ...]:
        return self.decision.actions

    def go(self, event: Event, after_s: float = 1.0) -> Decision:
        self.now_s += after_s
        self.decision = decide(self.job, event, self.now_s)
        self.all += self.decision.actions
        return self.decision

    def the(self, kind: type[_Action]) -> _Action:
        """The one action of this kind that the last event led to."""
        found = [action for action in self.done if isinstance(action, kind)]
        assert len(found) == 1, f"{kind.__name__} in {self.done}"
        return found[0]

    def has(self, kind: type[Action]) -> bool:
        return any(isinstance(action, kind) for action in self.done)

    def phase(self) -> str:
        return self.job.phase

    def state(self, node: str) -> str:
        return self.job.nodes[node].state

    def names(self) -> list[str]:
        return [type(action).__name__ for action in self.done]

    def opened(self) -> list[str]:
        return [action.incident.cause for action in self.all if isinstance(action, Opened)]

    def closed(self) -> list[tuple[str, str]]:
        return [(a.incident.cause, a.outcome) for a in self.all if isinstance(a, Closed)]

    # ------------------------------------------------------------ ways to a state

    def join(self, *names: str, checked: bool = True) -> None:
        for name in names:
            self.go(NodeJoined(name, f"i-{name}", f"host-{name}", "127.0.0.1"))
            if checked and self.job.nodes[name].state == "checking":
                self.go(CheckDone(name, ok=True))

    def train(self, step: int = 5) -> None:
        """From the start to a finished step, with the nodes that are asked for."""
        spares, nodes = self.job.policy.spares, self.job.policy.num_nodes
        names = [f"n{i}" for i in range(nodes)]
        self.go(Allocated(nodes, tuple(names)))
        more = tuple(f"s{i}" for i in range(spares))
        if more:
            self.go(Allocated(spares, more))
        self.join(*names, *more)
        assert self.job.phase == "starting", self.job.phase
        self.steps(step)

    def steps(self, step: int) -> None:
        assert self.job.ranks_epoch is not None, self.job.phase
        self.go(RanksStarted(self.job.ranks_epoch))
        self.go(StepReached(self.job.ranks_epoch, step))

    def stopped(self) -> None:
        """Every node that is waited for says that its ranks are gone."""
        assert self.job.phase == "stopping", self.job.phase
        assert self.job.recovery is not None
        for name in sorted(self.job.recovery.waiting):
            self.go(CommandDone(name, "stop", self.job.epoch))

    def checked(self, ok: bool = True) -> None:
        """Every node with ranks that is being checked passes, or fails."""
        checking = [n.name for n in self.job.in_state("checking") if n.node_rank is not None]
        assert checking, [(n.name, n.state) for n in self.job.nodes.values()]
        for name in checking:
            self.go(CheckDone(name, ok, () if ok else ("gemm",)))

    def places(self) -> dict[int, str]:
        """Of the newest StartEpoch."""
        starts = [action for action in self.all if isinstance(action, StartEpoch)]
        return {place.node_rank: place.node for place in starts[-1].places}
