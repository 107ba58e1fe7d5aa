"""What an agent started, written down, so that whoever comes after it can end what is left.

    RUN/agents/NODE/processes.json   written by the agent at each change
    RUN/agents/NODE/lock             held by the agent as long as it lives

A process that is found again is ended if one of three things holds: its pid and start are on
record; it is in a session with one of those (a session's number is not given again while a member
lives); or its environment has the page folder of this node and run, which only our ranks were
given. That folder is another one for each agent, so that the watchdog of one never meets the ranks
of the next. So nothing is ended that we did not start, also after pids were given again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megascale.cluster.agent import page_folders
from megascale.cluster.agent.proc import (
    Identity,
    Stat,
    all_stats,
    boot_id,
    marker_of,
    own_line,
    send,
)
from megascale.env import hostname
from megascale.errors import LaunchError

PAGE_VARIABLE = "MEGASCALE_PROGRESS_PAGE"
_SWEEP_POLL_S = 0.02


HELPER = -1


@dataclass(frozen=True)
class Member:
    """A rank, a process below it, or (`rank` HELPER) one that works for the agent."""

    pid: int
    start_ticks: int
    session: int
    rank: int
    epoch: int

    @property
    def identity(self) -> Identity:
        return self.pid, self.start_ticks


@dataclass(frozen=True)
class Record:
    """All that one agent has running; `pages`: how the paths of its ranks' progress pages begin."""

    pages: str
    members: tuple[Member, ...] = ()
    host: str = field(default_factory=hostname)
    boot: str = field(default_factory=boot_id)

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Record:
        """Raises ValueError, KeyError or TypeError for what is no record."""
        entry = json.loads(text)
        entry["members"] = tuple(Member(**member) for member in entry["members"])
        return cls(**entry)


class Ledger:
    """The folder of a node under the run folder. One agent at a time has it open."""

    def __init__(self, run_dir: Path, node: str) -> None:
        self.folder = run_dir / "agents" / re.sub(r"[^\w.@+-]", "_", node)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "processes.json"
        self.is_written = False
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise LaunchError(
                f"an agent of node {node} is running already and holds {self.folder / 'lock'}; "
                "end it, or give this one another --node"
            ) from None
        key = hashlib.sha256(f"{run_dir.resolve()}\0{node}".encode()).hexdigest()[:16]
        memory = page_folders.SHARED_MEMORY
        where = memory if os.access(memory, os.W_OK | os.X_OK) else self.folder
        self._all_pages = where / f"{page_folders.PREFIX}{key}-"
        self.pages = Path(f"{self._all_pages}{secrets.token_hex(8)}")
        self._owns: int | None = None

    def write(self, record: Record) -> None:
        """Replace the record, whole. Raises OSError, and `is_written` is false then."""
        self.is_written = False
        new = self._file.with_suffix(".new")
        new.write_text(record.to_json())
        new.replace(self._file)
        self.is_written = True

    def read(self) -> Record:
        """The last agent's record, its `pages` the beginning of those of all agents of this node;
        without members where there is none of this host since it booted.

        A record that cannot be read counts as none: the environment still tells whose child it is.
        """
        empty = Record(str(self._all_pages))
        try:
            record = Record.from_json(self._file.read_text())
        except (OSError, ValueError, KeyError, TypeError):
            return empty
        is_of_now = (record.host, record.boot) == (empty.host, empty.boot)
        return replace(record, pages=empty.pages) if is_of_now else empty

    def make_pages(self) -> None:
        """The folder of this agent's pages, after those of dead agents are taken away, of this node
        and of any other on the host. Raises OSError."""
        self.clear_pages()
        page_folders.clear_dead(self.pages.parent)
        self._owns = page_folders.make(self.pages)

    def clear_pages(self) -> None:
        """Take away the pages of this agent and of those before it, and what lies beside them."""
        for folder in self._all_pages.parent.glob(self._all_pages.name + "*"):
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for descriptor in (self._lock, self._owns):
            if descriptor is not None:
                os.close(descriptor)


def remaining(record: Record) -> list[Stat]:
    """Living processes of `record`: those on it, those in their sessions, and those marked."""
    stats, spared = all_stats(), own_line()
    known = {member.identity: member for member in record.members}
    found = {stat.pid: stat for stat in stats.values() if stat.identity in known and stat.is_alive}
    sessions = {stat.session for stat in found.values()} & {m.session for m in record.members}
    marker = f"{PAGE_VARIABLE}={record.pages}".encode()
    for stat in stats.values():
        if stat.is_alive and (stat.session in sessions or marker_of(stat, marker)):
            found[stat.pid] = stat
    return [stat for stat in found.values() if stat.pid not in spared]


def sweep(record: Record, deadline_s: float) -> list[Stat]:
    """End what is left of `record`. Returns those that are still there at the deadline."""
    give_up = time.monotonic() + deadline_s
    left = remaining(record)
    while left and time.monotonic() < give_up:
        _end(left)
        time.sleep(_SWEEP_POLL_S)
        left = remaining(record)
    return left


def _end(stats: Iterable[Stat]) -> None:
    for stat in stats:
        send(stat.identity, signal.SIGKILL)
