"""What the driver can do, as data: `decide` orders it, `driver/actions.py` carries it out.

Journaled as JSON beside the event that it answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale.cluster.incidents import Incident


@dataclass(frozen=True)
class Place:
    node: str
    node_rank: int


@dataclass(frozen=True)
class StartEpoch:
    """Start all ranks. `back`: so many of the newest checkpoints are set aside before;
    `newest_step`: so are those of later steps."""

    epoch: int
    places: tuple[Place, ...]
    resume: bool
    back: int = 0
    newest_step: int | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class StopEpoch:
    epoch: int
    nodes: tuple[str, ...]
    save: bool = False


@dataclass(frozen=True)
class SelfCheck:
    nodes: tuple[str, ...]
    level: Literal["light", "full"]
    deadline_s: float


@dataclass(frozen=True)
class DumpStacks:
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EvictNode:
    node: str
    reason: str
    block: bool


@dataclass(frozen=True)
class Replenish:
    count: int
    near: tuple[str, ...] = ()
    first: bool = False  # the job's own machines: all or none


@dataclass(frozen=True)
class Notify:
    text: str


@dataclass(frozen=True)
class Alert:
    text: str


@dataclass(frozen=True)
class Opened:
    incident: Incident


@dataclass(frozen=True)
class Closed:
    """The only end of an incident."""

    incident: Incident
    outcome: str


@dataclass(frozen=True)
class FinishJob:
    ok: bool
    report: str
    exit_code: int = 0


Action = (
    StartEpoch
    | StopEpoch
    | SelfCheck
    | DumpStacks
    | EvictNode
    | Replenish
    | Notify
    | Alert
    | Opened
    | Closed
    | FinishJob
)
