"""Warm processes: for each local rank one that has imported torch and waits to be told who it is.

A start order with the package's own program takes them (`train/warm.py` is what they run); any
other, and a local rank that has none, starts a new interpreter. The main thread's alone, and it
never waits for one of them.

A warm process is used if its environment is the wanted one but for what names rank and epoch
(`LATE`), and if the package's files are still those that it imported. One that is still importing
is told all the same: it is that much further than a new interpreter would be. One that has not
finished after `READY_S` is ended.

It ends as a rank ends: with the agent, by the watchdog, by the next agent. After a start the next
ones are begun once the ranks are past their first step, or after `REFILL_S`, a few at a time; on a
node without ranks after `QUIET_S`. Never beside a self-check, which measures speeds.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megascale.cluster.agent.ledger import Member
from megascale.cluster.agent.proc import read_stat
from megascale.cluster.agent.progress import Pages
from megascale.cluster.agent.rank_process import RankStatus
from megascale.cluster.agent.warm_process import WarmProcess, begin, code_now, early
from megascale.cluster.messages import WarmNodes

READY_S = 60.0
REFILL_S = 30.0
QUIET_S = 3.0  # without ranks, checks or news of the driver: what is ordered next needs the cores
CODE_S = 60.0  # between two looks at the package's files; a start looks anyway
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0  # after one that died
CORES_AN_IMPORT = 4
END_S = 2.0
_log = logging.getLogger(__name__)


class WarmRanks:
    """The pool.

    base     variables of a rank before its order's
    pages    the folder whose name marks what is this agent's
    logs     for what they write before they are ranks
    changed  called when a process began or is gone: it is to be written down
    """

    def __init__(
        self, base: Mapping[str, str], pages: Path, logs: Path, changed: Callable[[], None]
    ) -> None:
        self._early, self._pages = early(base), pages
        self._logs, self._changed = logs, changed
        self._mode: WarmNodes = "off"
        self._num = 0
        self._warm: dict[int, WarmProcess] = {}
        self._ending: list[WarmProcess] = []
        self._at_once = max(1, len(os.sched_getaffinity(0)) // CORES_AN_IMPORT)
        self._progress = Pages()
        self._first_steps: dict[str, int] = {}
        self._pause_s, self._paused_until_s = FIRST_PAUSE_S, 0.0
        self._code, self._looked_s, self._quiet_s = code_now(), 0.0, 0.0

    # ------------------------------------------------------------ what is wanted

    def want(self, mode: WarmNodes, num_ranks: int) -> None:
        """What the driver says when this node joins."""
        if mode == "off":
            self.end()
        self._quiet_s = time.monotonic()
        self._mode, self._num = mode, max(self._num, num_ranks)

    def expect(self, num_ranks: int) -> None:
        """A start has so many ranks here; 0: of a program that is not ours."""
        self._num, self._code = num_ranks, code_now()
        for local_rank in [one for one in self._warm if one >= num_ranks]:
            self._end(local_rank, "no rank needs it")

    def take(
        self, local_rank: int, environment: Mapping[str, str], arguments: Sequence[str], log: Path
    ) -> WarmProcess | None:
        """The process that is this rank from now on; None where there is none that fits."""
        if early(environment) != self._early:
            self._early = early(environment)
            for other in list(self._warm):
                self._end(other, "ranks have another environment now")
        warm = self._warm.get(local_rank)
        if warm is None or self._drop_if_unfit(warm, time.monotonic()):
            return None
        if not warm.tell(arguments, environment, log):
            self._end(local_rank, "it did not take its order")
            return None
        self._pause_s = FIRST_PAUSE_S
        return self._warm.pop(local_rank)

    def end(self) -> None:
        """All of them, and no more until wanted again."""
        self._mode = "off"
        for local_rank in list(self._warm):
            self._end(local_rank)

    def close(self) -> None:
        """End them and wait a moment until they are gone."""
        self.end()
        give_up_s = time.monotonic() + END_S
        while self._ending and time.monotonic() < give_up_s:
            self._collect()
            time.sleep(0.01)

    # ------------------------------------------------------------ what there is

    @property
    def members(self) -> list[Member]:
        return [warm.member for warm in (*self._warm.values(), *self._ending)]

    @property
    def rss_bytes(self) -> int:
        stats = (read_stat(member.pid) for member in self.members)
        return sum(stat.rss_bytes for stat in stats if stat is not None)

    def tick(self, now_s: float, statuses: Sequence[RankStatus], *, checks: bool) -> None:
        """Notice what has become ready or died; begin what is missing, where it does no harm.

        checks  a self-check runs
        """
        self._collect()
        for warm in list(self._warm.values()):
            if warm.look():
                self._tell_ready(warm, now_s)
            self._drop_if_dead(warm, now_s)
        if now_s - self._looked_s >= CODE_S:
            self._looked_s, self._code = now_s, code_now()
            for warm in list(self._warm.values()):
                self._drop_if_unfit(warm, now_s)
        running = tuple(status for status in statuses if status.state == "running")
        if checks or running:
            self._quiet_s = now_s
        if self._mode == "off" or len(self._warm) >= self._num or now_s < self._paused_until_s:
            return
        importing = sum(warm.ready is not None for warm in self._warm.values())
        if not checks and importing < self._at_once and self._is_calm(now_s, running):
            self._begin(min(set(range(self._num)) - self._warm.keys()), now_s)

    # ------------------------------------------------------------ inside

    def _is_calm(self, now_s: float, running: tuple[RankStatus, ...]) -> bool:
        self._progress.keep(running)
        pages = {status.page for status in running}
        self._first_steps = {page: s for page, s in self._first_steps.items() if page in pages}
        if not running:
            return now_s - self._quiet_s >= QUIET_S
        if self._mode == "spares":
            return False
        stepped = [self._has_stepped(status) for status in running]
        return all(stepped) or now_s - max(s.started_s for s in running) > REFILL_S

    def _has_stepped(self, status: RankStatus) -> bool:
        progress = self._progress.read(status)
        if progress is None or progress.step == 0:
            return False
        return progress.step > self._first_steps.setdefault(status.page, progress.step)

    def _begin(self, local_rank: int, now_s: float) -> None:
        try:
            log = self._log_of(local_rank)
            warm = begin(local_rank, self._early, self._pages, log, now_s)
        except OSError as error:
            self._pause(f"a warm process could not be started: {error}", now_s)
            return
        self._warm[local_rank] = warm
        self._changed()

    def _tell_ready(self, warm: WarmProcess, now_s: float) -> None:
        _log.info(
            "the warm process of local rank %d (pid %d) is ready after %.1f s; all hold %.0f MB",
            warm.local_rank,
            warm.pid,
            now_s - warm.started_s,
            self.rss_bytes / 1e6,
        )

    def _drop_if_unfit(self, warm: WarmProcess, now_s: float) -> bool:
        """Whether it must not become a rank; it is ended then."""
        if self._drop_if_dead(warm, now_s):
            return True
        warm.look()
        if warm.ready is not None and now_s - warm.started_s > READY_S:
            self._pause(f"a warm process was not ready in {READY_S:.0f} s", now_s)
            self._end(warm.local_rank, "it is late")
        elif warm.code != self._code:
            self._end(warm.local_rank, "the package's files have changed since it began")
        else:
            return False
        return True

    def _drop_if_dead(self, warm: WarmProcess, now_s: float) -> bool:
        code = warm.process.poll()
        if code is None:
            return False
        del self._warm[warm.local_rank]
        warm.close()
        self._changed()
        log = self._log_of(warm.local_rank)
        self._pause(f"a warm process (pid {warm.pid}) ended with {code}, see {log}", now_s)
        return True

    def _pause(self, why: str, now_s: float) -> None:
        _log.warning("%s; the next one is tried in %.0f s", why, self._pause_s)
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _end(self, local_rank: int, why: str = "") -> None:
        warm = self._warm.pop(local_rank)
        if why:
            _log.info("the warm process of local rank %d is ended: %s", local_rank, why)
        warm.end()
        self._ending.append(warm)

    def _collect(self) -> None:
        left = [warm for warm in self._ending if warm.process.poll() is None]
        if len(left) < len(self._ending):
            self._ending = left
            self._changed()

    def _log_of(self, local_rank: int) -> Path:
        return self._logs / f"warm-{local_rank:03d}.log"
