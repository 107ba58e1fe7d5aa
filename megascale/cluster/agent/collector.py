"""Reads what may be slow, in a thread of its own: logs, files of ranks, interfaces, the kernel.

A file system that hangs stops this thread and nothing else: heartbeats go on with what was known.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megascale.cluster.agent.board import Board, Key
from megascale.cluster.agent.failures import Recorded, explain, of_record
from megascale.cluster.agent.kernel import KernelLog, OutOfMemoryCounter, killed_pid
from megascale.cluster.agent.link import SeldomLog
from megascale.cluster.agent.log_reader import LogReader, Match
from megascale.cluster.agent.nics import Nics
from megascale.cluster.agent.rank_process import RankStatus
from megascale.cluster.agent.run_files import error_file, last_line, line_file, log_file
from megascale.cluster.agent.steps import LineTail
from megascale.cluster.messages import TEXT, Failure, LogMatch, StepSums

INTERVAL_S = 0.5
NICS_S = 1.0
LAST_READS = 8  # of the lines of a rank that has ended: nobody reads them later
MOST_MATCHES = 64  # kept of a rank
OUT_OF_MEMORY_S = 10.0  # between the counter's step and an end by SIGKILL
_log = logging.getLogger(__name__)


class _Followed:
    """The files of one rank in one epoch."""

    def __init__(self, status: RankStatus, cgroups: Path) -> None:
        self.run_dir = Path(status.run_dir)
        self.log = LogReader(log_file(self.run_dir, status.rank), status.log_offset)
        self.lines = LineTail(line_file(self.run_dir, status.rank), status.lines_offset)
        self.memory = OutOfMemoryCounter(status.pid, cgroups)
        self.matches: deque[Match] = deque(maxlen=MOST_MATCHES)

    def recorded(self, rank: int) -> Recorded | None:
        try:
            return Recorded.parse(error_file(self.run_dir, rank).read_text(errors="replace"))
        except OSError:
            return None


class Collector(threading.Thread):
    """`on_failure` is called, in this thread, when it has found why a rank ended."""

    def __init__(
        self,
        board: Board,
        statuses: Callable[[], tuple[RankStatus, ...]],
        on_failure: Callable[[], None],
        *,
        sys_root: Path,
        kernel_log: Path,
    ) -> None:
        super().__init__(name="collector", daemon=True)
        self._board, self._statuses, self._on_failure = board, statuses, on_failure
        self._followed: dict[Key, _Followed] = {}
        self._nics, self._nics_s = Nics(sys_root), -NICS_S
        self._kernel = KernelLog(kernel_log)
        self._killed: dict[int, float] = {}  # by the kernel, for memory: when it was seen
        self._cgroups = sys_root / "fs" / "cgroup"
        self._wake, self._ended = threading.Event(), threading.Event()
        self._seldom = SeldomLog(_log)

    def soon(self) -> None:
        """A rank changed its state."""
        self._wake.set()

    def end(self, timeout_s: float) -> None:
        self._ended.set()
        self._wake.set()
        self.join(timeout_s)

    def run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            try:
                self.collect()
            except Exception as error:  # noqa: BLE001 - an odd file must not end the watch over all
                self._seldom.warn("collecting failed: %r", error)
        self._kernel.close()

    def collect(self) -> None:
        """Look at everything once."""
        self._look_at_kernel()
        statuses = self._statuses()
        for status in statuses:
            if status.run_dir:
                self._look_at(status)
        wanted = {(status.epoch, status.rank) for status in statuses}
        for key in self._followed.keys() - wanted:
            del self._followed[key]
        if time.monotonic() - self._nics_s >= NICS_S:
            self._nics_s = time.monotonic()
            self._board.see_nics(self._nics.read())

    def _look_at_kernel(self) -> None:
        for match in self._kernel.read():
            self._board.matched(_message(match, None))
            pid = killed_pid(match)
            if pid is not None:
                self._killed[pid] = time.monotonic()
        old_s = time.monotonic() - 2 * OUT_OF_MEMORY_S
        self._killed = {pid: seen_s for pid, seen_s in self._killed.items() if seen_s > old_s}

    def _look_at(self, status: RankStatus) -> None:
        known, key = self._board.of(status), (status.epoch, status.rank)
        if known.is_explained:
            return
        if key not in self._followed:
            self._followed[key] = _Followed(status, self._cgroups)
        followed = self._followed[key]
        has_ended = status.ended_s is not None
        followed.memory.look()
        for match in followed.log.read(last=has_ended):
            followed.matches.append(match)
            self._board.matched(_message(match, status.rank))
        for _ in range(LAST_READS if has_ended else 1):
            for found in followed.lines.read():
                if isinstance(found, StepSums):
                    known.steps.add(found)
                else:
                    known.noticed.add(found)
        recorded = followed.recorded(status.rank)
        if has_ended:
            known.failure = self._explain(status, followed, recorded)
            known.is_explained = True
            self._on_failure()
        elif recorded is not None and known.failure is None:
            known.failure = of_record(recorded, None)
            self._on_failure()

    def _explain(
        self, status: RankStatus, followed: _Followed, recorded: Recorded | None
    ) -> Failure | None:
        assert status.ended_s is not None
        now_s = time.monotonic()
        rose_s = followed.memory.rose_s
        out_of_memory = status.pid in self._killed or (
            rose_s is not None and now_s - rose_s < OUT_OF_MEMORY_S
        )
        return explain(
            status.exit_code,
            asked=status.asked,
            recorded=recorded,
            out_of_memory=out_of_memory,
            matches=followed.matches,
            ended_ns=time.time_ns() - int((now_s - status.ended_s) * 1e9),
            last_words=last_line(log_file(Path(status.run_dir), status.rank), status.log_offset),
        )


def _message(match: Match, rank: int | None) -> LogMatch:
    return LogMatch(rule=match.rule.name, rank=rank, line=match.line[:TEXT], unix_ns=match.unix_ns)
