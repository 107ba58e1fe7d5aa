"""What a backend is: it gets machines with a running agent, and gives them up. Nothing else.

It knows no model, rank or checkpoint, and decides nothing: when to evict is `decide.py`'s.
Methods may block for a moment (they run in a thread of the driver) and raise BackendError.

What holds for all (`tests/cluster/backends/test_contract.py`):
  - A machine's name is given once. A host that comes back has another name, so that what an old
    agent still says is never taken for the new one's.
  - A blocked host is not given again in this job, also not by the backend of a restarted driver.
  - Whoever allocated or adopted last owns the job's machines; a backend of a driver before it gets
    FencedError from every method and touches nothing (`register.py`).
  - Agents outlive the driver. What a new driver does not adopt is ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from megascale.config.base import Section
from megascale.errors import LaunchError

Options = TypeVar("Options", bound=Section)


class BackendError(LaunchError):
    """The scheduler refused or did not answer; the message has its words."""


class FencedError(BackendError):
    """Another driver has this job's machines by now. The one that meets this ends itself."""


@dataclass(frozen=True)
class AgentStart:
    """How an agent finds its driver; a backend hands it over however it can.

    command    argv of the agent; `agent_argv` and `node_argv` append the rest
    token_file the driver's token, readable by the owner only; never on a command line
    """

    command: Sequence[str]
    driver_url: str
    token_file: str
    run_dir: str


@dataclass(frozen=True)
class Sizes:
    """What a scheduler must know of the job.

    procs_per_node  ranks of a machine: what is reserved on each
    spares          machines that the driver keeps beside those that train. It asks for them itself
                    (`replenish` after `allocate`); only what is sized beforehand needs the number
    """

    procs_per_node: int = 1
    spares: int = 0


def agent_argv(start: AgentStart) -> list[str]:
    """The agent's command line but for `node_argv`. Paths are the driver's on every machine."""
    return [
        *start.command,
        *("--driver", start.driver_url),
        *("--token-file", start.token_file),
        *("--run-dir", start.run_dir),
    ]


def node_argv(name: str, host: str, switch: str | None = None) -> list[str]:
    """What tells an agent which machine it is; or a shell's or scheduler's words for that."""
    return ["--node", name, "--host-name", host, *(("--switch", switch) if switch else ())]


@dataclass(frozen=True)
class Machine:
    """A node that the backend gave. `name` is what its agent will join as."""

    name: str
    host: str
    switch: str | None = None
    handle: str = ""  # the backend's own: a pid, a job, a pod


@dataclass(frozen=True)
class MachineEvent:
    """What the scheduler says of a machine by itself. After "gone" and "preempted" it is no more.

    An eviction that was asked for is no event, unless something of the machine would not end: then
    "gone" says what, and its host is blocked.
    """

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
        """Up to `count` more, best under a switch of `near` (names of machines, or switches);
        empty if there are none."""

    def evict(self, name: str, reason: str, *, block: bool) -> None:
        """End the machine's agent and all it started; with `block` its host is not given again.

        Idempotent, and the machine is given up in any case: where something does not end within
        the deadline, or cannot be reached, the host is blocked and `watch` says so.
        BackendError for a name that was never given.
        """

    def watch(self) -> list[MachineEvent]:
        """What happened since the last call."""

    def adopt(self, machines: Sequence[Machine]) -> list[Machine]:
        """Those of `machines` that are still there. Ends agents of this job that are not in it."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


def parse_options(section: type[Options], backend: str, values: Mapping[str, Any]) -> Options:
    """The checked options of a backend. LaunchError with every problem, one a line."""
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            told = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "missing":
                told = f"not set; give --backend-set {key}=VALUE"
            lines.append(f"{backend}.{key}: {told}" if key else f"{backend}: {told}")
        raise LaunchError("\n".join(lines)) from None


def switches_of(near: Iterable[str], switches: Mapping[str, str | None]) -> set[str]:
    """Switches meant by `near`: of the machines it names (`switches` by machine), or by name."""
    return {switches.get(name) or name for name in near}
