"""What a backend is: it gets machines with a running agent, and gives them up. Nothing else.

It knows no model, rank or checkpoint, and decides nothing: when to evict is `decide.py`'s.
Methods may block for a moment (they run in a thread of the driver) and raise BackendError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from megascale.errors import LaunchError


class BackendError(LaunchError):
    """The scheduler refused or did not answer; the message has its words."""


@dataclass(frozen=True)
class AgentStart:
    """How an agent finds its driver; a backend hands it over however it can.

    command    argv of the agent, the node's name to be appended as `--node NAME`
    token_file the driver's token, readable by the owner only; never on a command line
    """

    command: Sequence[str]
    driver_url: str
    token_file: str
    run_dir: str


@dataclass(frozen=True)
class Machine:
    """A node that the backend gave. `name` is what its agent will join as."""

    name: str
    host: str
    switch: str | None = None
    handle: str = ""  # the backend's own: a pid, a job step, a pod


@dataclass(frozen=True)
class MachineEvent:
    """What the scheduler says of a machine by itself."""

    name: str
    kind: Literal["up", "down", "gone", "preempted"]
    reason: str = ""


class Backend(Protocol):
    """One of these a job. After `adopt`, a restarted driver has the machines of the one before."""

    def allocate(self, count: int, *, exclude: Sequence[str] = ()) -> list[Machine]:
        """Start agents on `count` machines, none on a host in `exclude`; at once, all or none."""

    def replenish(
        self, count: int, *, exclude: Sequence[str] = (), near: Sequence[str] = ()
    ) -> list[Machine]:
        """Up to `count` more, best under a switch of `near`; empty if there are none."""

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        """End the machine's agent and all it started; with `block` its host is not given again."""

    def watch(self) -> list[MachineEvent]:
        """What happened since the last call."""

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        """Those of `machines` that are still there."""

    def close(self) -> None:
        """Give everything back. Idempotent."""
