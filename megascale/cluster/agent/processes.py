"""The ranks of the node: started, looked at, ended; the main thread's alone.

The agent adopts what ranks leave behind (PR_SET_CHILD_SUBREAPER) and collects it. All that runs is
in the ledger and with the watchdog, at the latest a second after it began; what began and lost its
parent within that second is known by its environment.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from megascale.cluster.agent.birth_command import birth
from megascale.cluster.agent.ledger import HELPER, PAGE_VARIABLE, Ledger, Member, Record, sweep
from megascale.cluster.agent.proc import Stat, all_stats, has_dead_child, marker_of, read_stat
from megascale.cluster.agent.progress import make_page, page_path, rank_of_page
from megascale.cluster.agent.rank_process import (
    Deadlines,
    RankProcess,
    RankStatus,
    left_over,
)
from megascale.cluster.agent.run_files import error_file, last_line_end, line_file, log_file
from megascale.cluster.agent.warm import WarmRanks
from megascale.cluster.agent.warm_process import Child
from megascale.cluster.agent.warm_template import CHECK_PROGRAM
from megascale.cluster.agent.watchdog import Watchdog
from megascale.cluster.messages import RankPlace, StartRanks
from megascale.env import MEMORY_SLOTS, child_environment
from megascale.errors import LaunchError

SCAN_S = 1.0
ENDING_SCAN_S = 0.1
SWEEP_DEADLINE_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_log = logging.getLogger(__name__)


class Ranks:
    """Every rank that this agent knows; `statuses` may be read from any thread."""

    def __init__(self, ledger: Ledger) -> None:
        self.deadlines = Deadlines()
        self.statuses: tuple[RankStatus, ...] = ()
        self._helpers: dict[int, Member] = {}
        self._ledger = ledger
        self._ranks: list[RankProcess] = []
        self._session = os.getsid(0)
        self._scanned_s = -SCAN_S
        self._record = Record(str(ledger.pages))
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._sweep_last_agents()
        ledger.make_pages()
        self._watchdog = Watchdog()
        self.warm = WarmRanks(_base(), ledger.pages, ledger.folder, self._write_record)
        self._write_record()

    # ------------------------------------------------------------ orders

    def start(self, order: StartRanks, epoch: int) -> dict[int, str]:
        """Start the ranks of `order` that do not run yet; why, by rank, for those that cannot.

        Raises LaunchError where ranks of another epoch are still there.
        """
        running = {r.status.rank: r for r in self._ranks if not r.is_over}
        others = [r for r in running.values() if r.status.epoch != epoch or r.status.asked]
        if others:
            raise LaunchError(
                "still there: "
                + ", ".join(
                    f"rank {r.status.rank} of epoch {r.status.epoch} (pid {r.pid}, "
                    f"{r.status.state})"
                    for r in others
                )
                + "; stop them first, and evict the node where one is unkillable"
            )
        self._ranks = [r for r in self._ranks if r.status.epoch == epoch or not r.is_over]
        failed = {}
        is_ours = order.program is None
        self.warm.expect(max((p.local_rank + 1 for p in order.ranks), default=0) * is_ours)
        for place in order.ranks:
            if any(r.status.rank == place.rank for r in self._ranks):
                continue  # the order came twice
            try:
                self._ranks.append(self._spawn(order, place, epoch))
            except OSError as error:
                failed[place.rank] = f"{error.strerror or error} ({error.filename})"
        self._publish()
        self._scan(time.monotonic())
        return failed

    def stop(self, epoch: int, *, save: bool) -> list[RankProcess]:
        """Ask every rank up to `epoch` to end; those that are not over yet."""
        now_s = time.monotonic()
        self._scan(now_s)
        asked = [r for r in self._ranks if r.status.epoch <= epoch and not r.is_over]
        for rank in asked:
            rank.ask(now_s, self.deadlines, save=save)
        self._publish()
        return asked

    def tick(self) -> bool:
        """Look and act, 20 times a second; whether a rank changed its state."""
        now_s = time.monotonic()
        ending = any(rank.is_ending for rank in self._ranks)
        for rank in self._ranks:
            rank.advance(now_s, self.deadlines)
        newly = any(rank.is_ending for rank in self._ranks) and not ending
        interval_s = ENDING_SCAN_S if ending else SCAN_S
        if newly or now_s - self._scanned_s >= interval_s:
            self._scan(now_s)
            self._watchdog.tend()
        changed = self._publish()
        self.warm.tick(now_s, self.statuses, checks=bool(self._helpers))
        return changed

    def start_check(self, arguments: list[str], output: Path) -> Child:
        """The node's self-check, warm where that can be: it ends with the agent as a rank does, in
        its own session.

        output  what it prints is added to this file
        Whoever starts it collects it, and says so with `helper_ended`. Raises OSError.
        """
        warm = self.warm.take_check(arguments, output)
        if warm is not None:
            process = warm.process
        else:
            with output.open("ab") as file:
                process = subprocess.Popen(
                    [*birth(), sys.executable, "-m", CHECK_PROGRAM, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        stat = read_stat(process.pid)
        assert stat is not None, f"own child {process.pid} is not in /proc"
        self._helpers[stat.pid] = Member(stat.pid, stat.start_ticks, stat.pid, HELPER, 0)
        self._write_record()
        return process

    def helper_ended(self, pid: int) -> None:
        self._helpers.pop(pid, None)
        self._write_record()

    @property
    def is_idle(self) -> bool:
        return all(rank.is_settled for rank in self._ranks)

    def close(self) -> None:
        """End the watchdog and take the pages away; ranks have ended before."""
        self.warm.close()
        self._watchdog.close()
        self._ledger.clear_pages()

    # ------------------------------------------------------------ inside

    def _spawn(self, order: StartRanks, place: RankPlace, epoch: int) -> RankProcess:
        run_dir = Path(order.run_dir)
        log, lines = log_file(run_dir, place.rank), line_file(run_dir, place.rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        error_file(run_dir, place.rank).unlink(missing_ok=True)  # of an epoch before
        page = page_path(self._ledger.pages, place.rank, epoch)
        make_page(page)
        environment = _environment(order, place, epoch, page)
        program = order.program or [sys.executable, "-m", "megascale"]
        with log.open("ab") as output:
            log_offset = output.tell()
            output.write(_epoch_line(place.rank, epoch))
            output.flush()
            process = self._take_warm(order, place, environment, log) or subprocess.Popen(
                [*birth(), *program, *order.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        stat = read_stat(process.pid)
        assert stat is not None, f"own child {process.pid} is not in /proc"
        status = RankStatus(
            rank=place.rank,
            local_rank=place.local_rank,
            pid=process.pid,
            start_ticks=stat.start_ticks,
            epoch=epoch,
            state="running",
            is_ours=order.program is None,
            started_s=time.monotonic(),
            run_dir=order.run_dir,
            page=str(page),
            lines_offset=last_line_end(lines),
            log_offset=log_offset,
        )
        return RankProcess(status, process)

    def _take_warm(
        self, order: StartRanks, place: RankPlace, environment: Mapping[str, str], log: Path
    ) -> Child | None:
        if order.program is not None:
            return None
        warm = self.warm.take(place.local_rank, environment, order.arguments, log)
        return None if warm is None else warm.process

    def _scan(self, now_s: float) -> None:
        self._scanned_s = now_s
        if not self._ranks and not has_dead_child():
            return
        stats = all_stats()
        for rank in self._ranks:
            if not rank.is_over:
                rank.look(stats)
        self._look_after_adopted(stats)
        self._write_record()

    def _look_after_adopted(self, stats: Mapping[int, Stat]) -> None:
        """Collect dead grandchildren, and give living ones that no rank knows to theirs."""
        own = {rank.pid for rank in self._ranks} | {self._watchdog.pid} | self._helpers.keys()
        own |= {member.pid for member in self.warm.members}
        known = {pid for rank in self._ranks for pid, _ in rank.below}
        marker = f"{PAGE_VARIABLE}={self._ledger.pages}/".encode()
        for stat in stats.values():
            if stat.parent != os.getpid() or stat.pid in own or stat.session == self._session:
                continue
            if not stat.is_alive:
                with suppress(ChildProcessError):
                    os.waitpid(stat.pid, os.WNOHANG)
            elif stat.pid not in known and (found := marker_of(stat, marker)):
                whose = rank_of_page(os.fsdecode(found.partition(b"=")[2]))
                for rank in self._ranks:
                    if (rank.status.rank, rank.status.epoch) == whose:
                        rank.adopt(stat)

    def _write_record(self) -> None:
        members = [member for rank in self._ranks for member in rank.members()]
        members += [*self._helpers.values(), *self.warm.members]
        record = replace(self._record, members=tuple(sorted(members, key=lambda m: m.pid)))
        if record == self._record and self._ledger.is_written:
            return
        self._record = record
        self._watchdog.tell(record)
        try:
            self._ledger.write(record)
        except OSError as error:
            _log.warning("the record of processes was not written: %s", error)

    def _publish(self) -> bool:
        statuses = tuple(rank.status for rank in self._ranks)
        changed = [s.state for s in statuses] != [s.state for s in self.statuses]
        self.statuses = statuses
        return changed

    def _sweep_last_agents(self) -> None:
        last = self._ledger.read()
        members = {member.identity: member for member in last.members}
        for stat in sweep(last, SWEEP_DEADLINE_S):
            _log.error("pid %d of an earlier agent does not end (state %s)", stat.pid, stat.state)
            member = members.get(stat.identity)
            if member is not None and member.rank != HELPER:
                self._ranks.append(left_over(member, time.monotonic()))
        self._publish()


def _base() -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    return {**defaults, **child_environment({})}


def _environment(order: StartRanks, place: RankPlace, epoch: int, page: Path) -> dict[str, str]:
    names = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(order.world_size),
        "LOCAL_WORLD_SIZE": str(order.local_world_size),
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(order.master_port),
    }
    own = {PAGE_VARIABLE: str(page), "MEGASCALE_EPOCH": str(epoch)}
    if page.is_relative_to("/dev/shm"):  # not the run folder: that is no memory
        # Files of `checkpoint/memory`: they outlive ranks and epochs, and go with the pages.
        own[MEMORY_SLOTS] = str(page.with_name(f"slots-{place.local_rank:03d}"))
    return {**_base(), **names, **order.environment, **own}


def _epoch_line(rank: int, epoch: int) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return f"[agent] {now} rank {rank} starts in epoch {epoch}\n".encode()
