"""Warm processes: for each local rank one that has imported torch and waits to be told who it is.

A start order with the package's own program takes them (`train/warm.py` is what they run); any
other, and a local rank that has none, starts a new interpreter. One more waits to be the node's
self-check. The main thread's alone, and it never waits for one of them.

They are forks of one process that has imported everything (`warm_template.py`): one import a node,
and the next ones are there at once. Where that process finds that a fork would not be safe, each
imports for itself, a few at a time. An import is begun when it is calm (`warm_calm.py`), and never
beside a self-check, which measures speeds. Only the first template is begun at once, when the node
joins: the node's first self-check waits for it.

A warm process is used if its environment is the wanted one but for what names rank and epoch
(`LATE`), and if the package's files are still those that it imported. One that still imports by
itself is told all the same: it is further than a new interpreter would be. One that has not
finished after `READY_S` is ended. It ends as a rank ends: with the agent, or by its watchdog.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megascale.cluster.agent.ledger import Member
from megascale.cluster.agent.rank_process import RankStatus
from megascale.cluster.agent.warm_calm import Calm
from megascale.cluster.agent.warm_process import WarmProcess, begin, code_now, early, held_bytes
from megascale.cluster.agent.warm_template import CHECK_PROGRAM, Template, begin_template
from megascale.cluster.messages import WarmNodes

READY_S = 60.0
CODE_S = 60.0  # between two looks at the package's files; a start looks anyway
CORES_AN_IMPORT = 4
END_S = 2.0
CHECK = -1  # in place of a local rank: who waits to be the self-check
_OTHER_CODE = "the package's files have changed since it began"
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
        self._ending: list[WarmProcess | Template] = []
        self._template: Template | None = None
        self._forks = True  # until a template says that it must not
        self._at_once = max(1, len(os.sched_getaffinity(0)) // CORES_AN_IMPORT)
        self._calm = Calm()
        self._code, self._looked_s = code_now(), 0.0

    # ------------------------------------------------------------ what is wanted

    def want(self, mode: WarmNodes, num_ranks: int) -> None:
        """What the driver says when this node joins."""
        if mode == "off":
            self.end()
        now_s = time.monotonic()
        self._calm.disturbed(now_s)
        self._mode, self._num = mode, max(self._num, num_ranks)
        if mode != "off" and self._num and self._forks and not self.members:
            self._begin_template(now_s)

    def expect(self, num_ranks: int) -> None:
        """A start has so many ranks here; 0: of a program that is not ours."""
        self._num, self._code = num_ranks, code_now()
        for local_rank in [one for one in self._warm if one >= num_ranks or not num_ranks]:
            self._end(local_rank, "no rank needs it")
        if not num_ranks:
            self._end_template("no rank needs it")
        elif self._template is not None and self._template.code != self._code:
            self._end_template(_OTHER_CODE)

    def take(
        self, local_rank: int, environment: Mapping[str, str], arguments: Sequence[str], log: Path
    ) -> WarmProcess | None:
        """The process that is this rank from now on; None where there is none that fits."""
        if early(environment) != self._early:
            self._early = early(environment)
            self._end_all("ranks have another environment now")
        warm = self._warm.get(local_rank)
        if warm is None or self._drop_if_unfit(warm, time.monotonic()):
            return None
        if not warm.tell(arguments, environment, log):
            self._end(local_rank, "it did not take its order")
            return None
        self._calm.worked()
        return self._warm.pop(local_rank)

    def take_check(self, arguments: Sequence[str], output: Path) -> WarmProcess | None:
        """The process that is the node's self-check from now on; None where there is none.

        output  for what it prints
        """
        warm = self._warm.get(CHECK)
        if warm is None or self._drop_if_unfit(warm, time.monotonic()):
            return None
        if not warm.tell(arguments, {}, output, CHECK_PROGRAM):
            self._end(CHECK, "it did not take its order")
            return None
        return self._warm.pop(CHECK)

    def end(self) -> None:
        """All of them, and no more until wanted again."""
        self._mode = "off"
        self._end_all()

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
        template = () if self._template is None else (self._template,)
        return [one.member for one in (*template, *self._warm.values(), *self._ending)]

    @property
    def held_bytes(self) -> int:
        """Of memory, what several share counted once."""
        return sum(held_bytes(member.pid) for member in self.members)

    @property
    def check_is_coming(self) -> bool:
        """Whether one that can be the self-check will be there in a moment."""
        template = self._template
        on_its_way = template is not None and template.state in ("imports", "forks")
        return on_its_way and self._num > 0 and CHECK not in self._warm

    def tick(self, now_s: float, statuses: Sequence[RankStatus], *, checks: bool) -> None:
        """Notice what has become ready or died; begin what is missing, where it does no harm.

        checks  a self-check runs
        """
        self._collect()
        self._look_at_template(now_s)
        for warm in list(self._warm.values()):
            if warm.look():
                self._tell_ready(warm, now_s)
            self._drop_if_dead(warm, now_s)
        if now_s - self._looked_s >= CODE_S:
            self._looked_s, self._code = now_s, code_now()
            for warm in list(self._warm.values()):
                self._drop_if_unfit(warm, now_s)
            if self._template is not None and self._template.code != self._code:
                self._end_template(_OTHER_CODE)
        running = tuple(status for status in statuses if status.state == "running")
        if checks or running:
            self._calm.disturbed(now_s)
        if self._mode == "spares" and running:
            self._end_all("this node has ranks now")
        elif self._mode != "off" and not self._calm.is_paused(now_s):
            self._refill(now_s, running, checks=checks)

    # ------------------------------------------------------------ inside

    def _refill(self, now_s: float, running: tuple[RankStatus, ...], *, checks: bool) -> None:
        there = self._warm.keys()
        missing = sorted(set(range(self._num)) - there)
        if not self._forks:
            importing = sum(warm.ready is not None for warm in self._warm.values())
            calm = not checks and self._calm.is_now(now_s, running)
            if missing and calm and importing < self._at_once:
                self._begin(missing[0], now_s)
        elif self._template is None:
            if missing and not checks and self._calm.is_now(now_s, running):
                self._begin_template(now_s)
        elif self._template.state == "forks" and self._num:
            for one in sorted({*missing, CHECK} - there - {*self._template.coming}):
                if not self._template.ask(one, self._log_of(one)):
                    self._calm.pause("the warm template did not take a request", now_s)
                    self._end_template()
                    return

    def _look_at_template(self, now_s: float) -> None:
        """Take over the children that have come; drop it where it is of no use."""
        template = self._template
        if template is None:
            return
        for warm in template.look(now_s):
            self._warm[warm.local_rank] = warm
            self._changed()
            self._tell_ready(warm, now_s)
        code = template.process.poll()
        if template.state == "cannot":
            _log.warning("a warm process imports for itself: the template says %s", template.why)
            self._forks = False
            self._end_template()
        elif code is not None or template.state == "failed":
            why = template.why or f"ended with {code}, see {self._log_of('template')}"
            self._calm.pause(f"the warm template (pid {template.pid}) {why}", now_s)
            self._end_template()
        elif template.state == "imports" and now_s - template.started_s > READY_S:
            self._calm.pause(f"the warm template was not ready in {READY_S:.0f} s", now_s)
            self._end_template()

    def _begin_template(self, now_s: float) -> None:
        try:
            log = self._log_of("template")
            self._template = begin_template(self._early, self._pages, log, now_s)
        except OSError as error:
            self._calm.pause(f"a warm template could not be started: {error}", now_s)
            return
        self._code = self._template.code
        self._changed()

    def _begin(self, local_rank: int, now_s: float) -> None:
        try:
            log = self._log_of(local_rank)
            warm = begin(local_rank, self._early, self._pages, log, now_s)
        except OSError as error:
            self._calm.pause(f"a warm process could not be started: {error}", now_s)
            return
        self._warm[local_rank] = warm
        self._changed()

    def _tell_ready(self, warm: WarmProcess, now_s: float) -> None:
        if warm.local_rank == CHECK:
            _log.info("the next self-check (pid %d) is warm", warm.pid)
            return
        text = "the warm process of local rank %d (pid %d) is ready after %.1f s; all hold %.0f MB"
        after_s = now_s - warm.started_s
        _log.info(text, warm.local_rank, warm.pid, after_s, self.held_bytes / 1e6)

    def _drop_if_unfit(self, warm: WarmProcess, now_s: float) -> bool:
        """Whether it must not become a rank; it is ended then."""
        if self._drop_if_dead(warm, now_s):
            return True
        warm.look()
        if warm.ready is not None and now_s - warm.started_s > READY_S:
            self._calm.pause(f"a warm process was not ready in {READY_S:.0f} s", now_s)
            self._end(warm.local_rank, "it is late")
        elif warm.code != self._code:
            self._end(warm.local_rank, _OTHER_CODE)
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
        self._calm.pause(f"a warm process (pid {warm.pid}) ended with {code}, see {log}", now_s)
        return True

    def _end(self, local_rank: int, why: str = "") -> None:
        warm = self._warm.pop(local_rank)
        if why:
            whose = "the self-check" if local_rank == CHECK else f"local rank {local_rank}"
            _log.info("the warm process of %s is ended: %s", whose, why)
        warm.end()
        self._ending.append(warm)

    def _end_template(self, why: str = "") -> None:
        if self._template is None:
            return
        if why:
            _log.info("the warm template is ended: %s", why)
        self._template.end()
        self._ending.append(self._template)
        self._template = None
        self._changed()

    def _end_all(self, why: str = "") -> None:
        self._end_template(why)
        for local_rank in list(self._warm):
            self._end(local_rank, why)

    def _collect(self) -> None:
        left = [warm for warm in self._ending if warm.process.poll() is None]
        if len(left) < len(self._ending):
            self._ending = left
            self._changed()

    def _log_of(self, whose: int | str) -> Path:
        return self._logs / f"warm-{'check' if whose == CHECK else whose}.log"
