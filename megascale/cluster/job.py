"""The state of a job, as one frozen value: what `decide.py` reads and returns.

Invariants, which the state machine test holds up: the epoch never falls; no two nodes hold one node
rank; a node has a node rank only while it is usable. Times are seconds of the job's clock, which
starts at 0 with the job and goes on over restarts of the driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megascale.cluster.incidents import Incident
from megascale.cluster.ledger import Ledger
from megascale.cluster.transitions import Policy, Readopted

Phase = Literal[
    "allocating", "checking", "starting", "training", "stopping", "diagnosing", "done", "failed"
]
NodeState = Literal[
    "joining", "checking", "spare", "active", "suspect", "lost", "evicted", "leaving"
]
OVER: tuple[NodeState, ...] = ("lost", "evicted", "leaving")
KEPT_FAULTS = 32


@dataclass(frozen=True)
class Node:
    """A machine with an agent.

    node_rank    which ranks it runs, or is meant to run; None: none
    before       what it was when it fell silent (state "suspect")
    until_s      when a joining or checking node is given up
    suspicions   hangs that named it although its self-check passed
    alerts       (kind, time) of signs that take two
    """

    name: str
    state: NodeState
    incarnation: str = ""
    host: str = ""
    ip: str = ""
    switch: str | None = None
    node_rank: int | None = None
    before: NodeState | None = None
    until_s: float | None = None
    suspicions: int = 0
    alerts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Fault:
    """One sign of what is wrong; several belong to one recovery.

    kind   of a failure, a finding or a piece of hardware
    nodes  that are guilty as far as this sign tells
    """

    kind: str
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    step: int | None = None
    text: str = ""
    code: int | None = None
    signal: str | None = None
    certain: bool = True
    agreed_step: int | None = None


@dataclass(frozen=True)
class Spent:
    """Restarts for a cause that still count, and the newest step at the last of them."""

    count: int
    step: int


Then = Literal["restart", "finish"]
Planned = Literal["", "evict", "update", "stop", "grow", "straggler", "driver_restart"]


@dataclass(frozen=True)
class Recovery:
    """A stop under way and what follows it.

    waiting  nodes that have not said yet that their ranks are gone
    evict    (node, reason, block), carried out before the next start
    checked  nodes whose self-check this recovery asked for
    settled  the ladder has spoken: `cause`, `back`, `report` are final
    """

    planned: Planned = ""
    save: bool = False
    waiting: frozenset[str] = frozenset()
    deadline_s: float = 0.0
    incident: int | None = None
    faults: tuple[Fault, ...] = ()
    evict: tuple[tuple[str, str, bool], ...] = ()
    settled: bool = False
    cause: str = ""
    back: int = 0
    newest_step: int | None = None
    then: Then = "restart"
    ok: bool = False
    report: str = ""
    exit_code: int = 0


@dataclass(frozen=True)
class Suspicion:
    """A hang that is being looked into."""

    since_s: float
    ranks: tuple[int, ...]
    incident: int
    step: int | None = None


@dataclass(frozen=True)
class JobState:
    """epoch: raised by each start and by each start of a driver; fences what is older.

    ranks_epoch   epoch in which the present ranks were started; None: no ranks
    world_nodes   nodes of that epoch: fewer than the policy's after a shrink
    exited        ranks of it that ended well
    newest_step   highest that was ever finished; `epoch_step`: of this epoch
    wanted        machines that the backend has been asked for and has not answered
    starved_s     when it last had none
    waiting_s     since when the job has had too few machines
    restarts      by cause, of the whole job; `spent`: those of it that count against budgets
    num_drivers   that this job has had; `readopted`: what came to the present one, once it is known
    """

    policy: Policy
    phase: Phase = "allocating"
    epoch: int = 0
    ranks_epoch: int | None = None
    world_nodes: int = 0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    exited: frozenset[int] = frozenset()
    newest_step: int = 0
    epoch_step: int | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    spent: Mapping[str, Spent] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    open: tuple[Incident, ...] = ()
    num_incidents: int = 0
    recovery: Recovery | None = None
    suspicion: Suspicion | None = None
    wanted: int = 0
    starved_s: float | None = None
    waiting_s: float | None = None
    overrides: tuple[str, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    num_drivers: int = 1
    readopted: Readopted | None = None
    report: str = ""

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed")

    @property
    def holders(self) -> Mapping[int, str]:
        """Node rank -> node."""
        return _holders(self.nodes)

    @property
    def world_size(self) -> int:
        return self.world_nodes * self.policy.procs_per_node

    @property
    def num_restarts(self) -> int:
        return sum(self.restarts.values())

    def spent_on(self, cause: str) -> int:
        """Restarts for `cause`, unless `restart_window_steps` new steps came after the last."""
        spent = self.spent.get(cause)
        window = self.policy.cluster.restart_window_steps
        return spent.count if spent and self.newest_step - spent.step < window else 0

    def in_state(self, *states: NodeState) -> list[Node]:
        return [node for node in self.nodes.values() if node.state in states]

    def ranks_of(self, node: Node) -> range:
        """Global ranks of a node; empty for one that holds none."""
        if node.node_rank is None:
            return range(0)
        procs = self.policy.procs_per_node
        return range(node.node_rank * procs, (node.node_rank + 1) * procs)

    def nodes_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        """Nodes that hold these ranks, each once, in order of node rank."""
        holders, procs = self.holders, self.policy.procs_per_node
        found = sorted({rank // procs for rank in ranks} & holders.keys())
        return tuple(holders[node_rank] for node_rank in found)

    def incident(self, cause: str) -> Incident | None:
        return next((one for one in self.open if one.cause == cause), None)


_newest: tuple[Mapping[str, Node], dict[int, str]] = ({}, {})


def _holders(nodes: Mapping[str, Node]) -> dict[int, str]:
    """Remembered for the newest `nodes`, which nobody changes: when a whole cluster fails, it is
    asked for each rank, and took two thirds of the time."""
    global _newest
    if _newest[0] is not nodes:
        found = {
            node.node_rank: node.name
            for node in nodes.values()
            if node.node_rank is not None and node.state not in OVER
        }
        _newest = (nodes, found)
    return _newest[1]


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key by which node-2 comes before node-10."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)
