"""One rank from its start until nothing of it is left; the main thread's alone.

A rank is a session and a process group of its own. It is asked to end (SIGTERM), then ended
(SIGKILL) with everything below it, also what has left its group, and every wait has an end: what is
still there `kill_deadline_s` after SIGKILL sits in the kernel and condemns the host ("unkillable").
A rank that ended by itself takes along what it started: nobody would read from those any more.

The rank's own process is not collected before the rest is gone: until then its number, which is
that of the group and the session, cannot be given to another.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from megascale.cluster.agent.ledger import Member
from megascale.cluster.agent.proc import Identity, Stat, below, read_stat, send
from megascale.cluster.agent.warm_process import Child

_log = logging.getLogger(__name__)

OWN_GRACE_S = 1.0
State = Literal["running", "exited", "unkillable"]


@dataclass(frozen=True)
class Deadlines:
    """How long a rank may take to end: asked, asked to save, and once killed.

    A trainer of ours that is not to save has `OWN_GRACE_S` at most: while it waits for a peer in a
    collective it cannot hear, and it has nothing to put away.
    """

    grace_s: float = 5.0
    save_deadline_s: float = 600.0
    kill_deadline_s: float = 10.0


@dataclass(frozen=True)
class RankStatus:
    """What other threads may know of a rank; replaced whole, never changed."""

    rank: int
    local_rank: int
    pid: int
    start_ticks: int
    epoch: int
    state: State
    started_s: float  # monotonic, as `ended_s`
    ended_s: float | None = None
    exit_code: int | None = None
    asked: bool = False  # to end, by us
    is_ours: bool = False  # the package's own program
    run_dir: str = ""
    page: str = ""
    lines_offset: int = 0  # of the line file and the log when it started
    log_offset: int = 0


class RankProcess:
    """A started rank. `look` and `advance` are called in turn until `is_over`."""

    def __init__(self, status: RankStatus, process: Child | None) -> None:
        self.status = status
        self.below: dict[Identity, Stat] = {}
        self.killed_s: float | None = None
        self._kill_after_s: float | None = None
        self._process = process
        self._reaped = process is None
        self._has_looked = False

    @property
    def pid(self) -> int:
        return self.status.pid

    @property
    def is_over(self) -> bool:
        """Nothing of it is left."""
        return self._reaped and not self.below

    @property
    def is_settled(self) -> bool:
        """Over, or given up."""
        return self.is_over or self.status.state == "unkillable"

    @property
    def is_ending(self) -> bool:
        return self.killed_s is not None and not self.is_over

    def members(self) -> list[Member]:
        rank, epoch = self.status.rank, self.status.epoch
        found = [
            Member(stat.pid, stat.start_ticks, stat.session, rank, epoch)
            for stat in self.below.values()
        ]
        if not self._reaped:
            found.append(Member(self.pid, self.status.start_ticks, self.pid, rank, epoch))
        return found

    def look(self, stats: Mapping[int, Stat]) -> None:
        """Find what lives below the rank: its session, its children, and theirs."""
        alive = {i: s for i, s in self._now(stats, self.below) if s.is_alive}
        roots = {self.pid} if not self._reaped else set()
        # only while a member holds it is the session's number this rank's
        if not self._reaped or any(stat.session == self.pid for stat in alive.values()):
            for stat in stats.values():
                if stat.session == self.pid and stat.pid != self.pid and stat.is_alive:
                    alive[stat.identity] = stat
        for pid in below(stats, roots | {pid for pid, _ in alive}):
            if stats[pid].is_alive:
                alive[stats[pid].identity] = stats[pid]
        alive.pop((self.pid, self.status.start_ticks), None)
        self.below = alive
        self._has_looked = True

    def adopt(self, stat: Stat) -> None:
        """Something that this rank started and that left no other trace than its environment."""
        self.below[stat.identity] = stat

    def ask(self, now_s: float, deadlines: Deadlines, *, save: bool) -> None:
        """SIGTERM. A later request shortens an earlier one's patience, never lengthens it.

        One that is to save is asked alone: what works for it must live until it has saved.
        """
        grace_s = deadlines.grace_s
        if self.status.is_ours:
            grace_s = min(grace_s, OWN_GRACE_S)
        patience_s = deadlines.save_deadline_s if save else grace_s
        until_s = now_s + patience_s
        if not self.status.asked or not save:
            self._signal(signal.SIGTERM, group=not save)
        self._kill_after_s = min(self._kill_after_s or until_s, until_s)
        self._set(asked=True)

    def advance(self, now_s: float, deadlines: Deadlines) -> None:
        """Do what is due: notice its end, kill, give up, collect."""
        if self.is_over:
            return
        self._notice_exit(now_s)
        overdue = self._kill_after_s is not None and now_s >= self._kill_after_s
        if self.killed_s is None and (overdue or self._has_exited):
            self.killed_s = now_s
            self._has_looked = False  # what it started in its last moment is not known yet
        if self.killed_s is None:
            return
        self._kill()
        if self._has_exited and self._has_looked and not self.below:
            self._collect(now_s)
        elif now_s - self.killed_s > deadlines.kill_deadline_s:
            self._set(state="unkillable")

    @property
    def _has_exited(self) -> bool:
        return self._reaped or self.status.exit_code is not None

    def _notice_exit(self, now_s: float) -> None:
        if self._has_exited:
            return
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            found = os.waitid(os.P_PID, self.pid, options)
        except ChildProcessError:  # not to be, but no reason to leave the other ranks alone
            _log.error("pid %d was collected by somebody else; its exit code is lost", self.pid)
            self._reaped = True
            self._set(state="exited", ended_s=now_s)
            return
        if found is None:
            return
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self._set(state="exited", exit_code=code, ended_s=now_s)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL, group=True)
        for identity in self.below:
            send(identity, signal.SIGKILL)

    def _signal(self, signum: int, *, group: bool) -> None:
        if self._reaped:
            return
        with suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.pid, signum)
            else:
                os.kill(self.pid, signum)

    def _collect(self, now_s: float) -> None:
        if self._process is not None and not self._reaped:
            self._process.wait(1.0)  # it has exited: this only collects it
        self._reaped = True
        ended_s = now_s if self.status.ended_s is None else self.status.ended_s
        self._set(state="exited", ended_s=ended_s)

    def _set(self, **changes: object) -> None:
        self.status = RankStatus(**{**vars(self.status), **changes})

    def _now(
        self, stats: Mapping[int, Stat], known: Mapping[Identity, Stat]
    ) -> list[tuple[Identity, Stat]]:
        return [
            (identity, stats[identity[0]])
            for identity in known
            if identity[0] in stats and stats[identity[0]].identity == identity
        ]


def left_over(member: Member, now_s: float) -> RankProcess:
    """A process of an earlier agent that did not end: reported like a rank that does not."""
    status = RankStatus(
        rank=member.rank,
        local_rank=0,
        pid=member.pid,
        start_ticks=member.start_ticks,
        epoch=member.epoch,
        state="unkillable",
        started_s=now_s,
    )
    rank = RankProcess(status, None)
    rank.killed_s = now_s
    stat = read_stat(member.pid)
    if stat is not None:
        rank.below[member.identity] = stat
    return rank
