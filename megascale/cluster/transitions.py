"""What can happen to a job, as data: from agents, backends, detectors, people and the clock.

Events are journaled as JSON, so their fields are JSON values, tuples and each other. Names of nodes
are the agents'; ranks are global. What the driver can do about them is in `actions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale.config.cluster import ClusterConfig
from megascale.plan.placement.job import JobPlacement
from megascale.telemetry.diagnose.finding import Finding


@dataclass(frozen=True)
class Policy:
    """What the job was started with; a restarted driver may come with another one.

    num_nodes    that train, spares apart
    legal_nodes  counts of nodes that the layout and the batch allow, ascending
    can_save     checkpoints are on, so that a planned stop costs no step
    resume       the run folder held a run before this job
    placement    of ranks on hosts by the network's shape; None: hosts by name
    """

    num_nodes: int
    procs_per_node: int
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    spares: int = 0
    legal_nodes: tuple[int, ...] = ()
    can_save: bool = True
    resume: bool = False
    placement: JobPlacement | None = None


@dataclass(frozen=True)
class NodeJoined:
    """An agent introduced itself. `ranks`: those alive on it, of the job's present ranks;
    `stale`: it has ranks of another epoch."""

    node: str
    incarnation: str
    host: str
    ip: str
    switch: str | None = None
    epoch: int = 0
    ranks: tuple[int, ...] = ()
    stale: bool = False


@dataclass(frozen=True)
class NodeHeard:
    """A node that was silent sent a heartbeat again. Ordinary heartbeats are no events."""

    node: str


@dataclass(frozen=True)
class NodeSilent:
    """No heartbeat for `silence_s`, by the driver's clock."""

    node: str
    silence_s: float


@dataclass(frozen=True)
class NodeGone:
    """The backend says so: positive evidence, nothing is waited for."""

    node: str
    reason: str = ""


@dataclass(frozen=True)
class Allocated:
    """The backend's answer to a request for `asked` machines: names that will join."""

    asked: int
    names: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class RankExited:
    """A rank of `epoch` ended. `kind` and `message` of its failure, where there is one."""

    rank: int
    code: int
    epoch: int
    kind: str = "exit"
    message: str = ""
    signal: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class HardwareSeen:
    """A device, link or process of a node is sick. Not `certain`: it takes two in five minutes.

    ranks  whose process it is; none: all of the node's are concerned
    """

    node: str
    kind: str
    detail: str = ""
    certain: bool = True
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class HangSuspected:
    """Ranks are past the deadline of their phase (`driver/progress.py`)."""

    ranks: tuple[int, ...]
    reason: str
    step: int | None = None


@dataclass(frozen=True)
class Found:
    """A detector spoke."""

    finding: Finding


@dataclass(frozen=True)
class CheckDone:
    node: str
    ok: bool
    failures: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CommandDone:
    node: str
    order: str
    epoch: int


@dataclass(frozen=True)
class CommandFailed:
    node: str
    order: str
    epoch: int
    reason: str = ""


@dataclass(frozen=True)
class RanksStarted:
    """Every rank of `epoch` is in its first step."""

    epoch: int


@dataclass(frozen=True)
class StepReached:
    """All ranks finished `step`; `saved_s` of the time since the last one went into a save."""

    epoch: int
    step: int
    saved_s: float = 0.0


@dataclass(frozen=True)
class EvictRequested:
    node: str
    reason: str
    block: bool = True


@dataclass(frozen=True)
class StopRequested:
    reason: str = ""


@dataclass(frozen=True)
class UpdateRequested:
    overrides: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Tick:
    """The clock, once a second."""


@dataclass(frozen=True)
class DriverRestarted:
    policy: Policy


@dataclass(frozen=True)
class Readopted:
    """`seconds` after this driver began, these `agents` of the one before had come to it.
    `missing`: those that had not, or were lost meanwhile."""

    agents: tuple[str, ...]
    missing: tuple[str, ...] = ()
    seconds: float = 0.0


Event = (
    NodeJoined
    | NodeHeard
    | NodeSilent
    | NodeGone
    | Allocated
    | RankExited
    | HardwareSeen
    | HangSuspected
    | Found
    | CheckDone
    | CommandDone
    | CommandFailed
    | RanksStarted
    | StepReached
    | EvictRequested
    | StopRequested
    | UpdateRequested
    | Tick
    | DriverRestarted
    | Readopted
)
