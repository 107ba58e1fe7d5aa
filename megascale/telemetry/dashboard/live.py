"""The run, held by one thread: it refreshes it, and answers what needs it, one thing at a time.

Questions that take long (the summary of 12,288 ranks asks a dozen readers) go to a second thread
with a run of its own over the same store, so that what is on the screen does not wait behind them.

However many browsers look, the store is read once: whoever asks the same of the same revision of
the run gets the same answer, also while it is being made; and one that took long is given for four
times as long, though the run went on. A question that finds too many before it, or waits too long,
is refused, not queued without end.

A run that is not there yet is waited for. How often is looked follows what looking costs: at most a
fifth of this thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from megascale.errors import MegascaleError
from megascale.telemetry.dashboard.answers import Body, RefusedError
from megascale.telemetry.store.run import Run

REFRESH_S = 1.0
SHARE = 0.2  # of the thread's time may go into looking whether there is anything new
MOST_ASKED = 64  # questions that wait
MOST_KEPT = 48  # answers
KEEP = 4.0  # times as long as it took to make, an answer is new enough

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """What is known of the run without asking it. `summary` is None until it is there.

    revision  counts what was new; 0: nothing yet
    why       what stands in the way where there is no run, or where it could not be refreshed
    """

    revision: int = 0
    why: str = "the run has not been opened yet"
    summary: Any = None


@dataclass
class _Kept:
    """An answer, or one that is being made. until_s: given until then, whatever came since."""

    revision: int
    future: Future[Body]
    until_s: float = 0.0

    def is_good(self, revision: int) -> bool:
        is_new = self.revision == revision or time.monotonic() < self.until_s
        return not self.future.cancelled() and (is_new or not self.future.done())


_Question = tuple[_Kept, Callable[[Run], Body]]


class LiveRun:
    """`start` and `close`; in between `seen` is current and `ask` answers.

    open_run   opens the run; MegascaleError while there is none
    summarise  made of the run at each new revision, in this thread: `Seen.summary`
    on_change  told of each new `Seen`, and of the one before it
    """

    def __init__(
        self,
        open_run: Callable[[], Run],
        summarise: Callable[[Run], Any],
        on_change: Callable[[Seen, Seen], None],
        *,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._open_run, self._summarise, self._on_change = open_run, summarise, on_change
        self._refresh_s = refresh_s
        self._run: Run | None = None
        self._questions: queue.Queue[_Question] = queue.Queue(MOST_ASKED)
        self._long_questions: queue.Queue[_Question] = queue.Queue(MOST_ASKED)
        self._answers: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name="run", daemon=True),
            threading.Thread(target=self._work_long, name="run, long questions", daemon=True),
        ]
        self.seen = Seen()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10.0)

    def ask(
        self, key: Hashable, answer: Callable[[Run], Body], *, is_long: bool = False
    ) -> Future[Body]:
        """`answer` of the run in the thread that holds it; for the same `key` the same future, as
        long as its answer is new enough. RefusedError (503) where there is no run, or too many
        questions wait.

        is_long  in the second thread, one of them at a time

        The future's own error: DataError for what cannot be asked of this run.
        """
        seen = self.seen
        if seen.revision == 0:
            raise RefusedError(503, seen.why)
        with self._lock:
            found = self._answers.get(key)
            if found is not None and found.is_good(seen.revision):
                self._answers.move_to_end(key)
                return found.future
            kept = _Kept(seen.revision, Future())
            try:
                questions = self._long_questions if is_long else self._questions
                questions.put_nowait((kept, answer))
            except queue.Full:
                raise RefusedError(503, f"{MOST_ASKED} questions wait already; try again") from None
            self._answers[key] = kept
            self._answers.move_to_end(key)
            while len(self._answers) > MOST_KEPT:
                self._answers.popitem(last=False)
        return kept.future

    def _work(self) -> None:
        due_s = 0.0
        try:
            while not self._closed.is_set():
                now_s = time.monotonic()
                if now_s >= due_s:
                    self._look()
                    took_s = time.monotonic() - now_s
                    due_s = time.monotonic() + max(self._refresh_s, took_s / SHARE)
                try:
                    wait_s = min(0.2, max(0.0, due_s - time.monotonic()))
                    question = self._questions.get(timeout=wait_s)
                except queue.Empty:
                    continue
                self._answer(*question, self._opened)
        finally:
            if self._run is not None:
                self._run.__exit__(None, None, None)

    def _opened(self) -> Run:
        assert self._run is not None, "there is a revision, so there is a run"
        return self._run

    def _work_long(self) -> None:
        own: Run | None = None

        def newest() -> Run:
            nonlocal own
            if own is None:
                own = self._opened().again()
            else:
                own.refresh()
            return own

        try:
            while not self._closed.is_set():
                try:
                    question = self._long_questions.get(timeout=0.2)
                except queue.Empty:
                    continue
                self._answer(*question, newest)
        finally:
            if own is not None:
                own.__exit__(None, None, None)

    def _look(self) -> None:
        """Open the run, or see what is new in it."""
        before = self.seen
        try:
            if self._run is None:
                self._run, is_new = self._open_run().__enter__(), True
            else:
                is_new = self._run.refresh()
            if is_new or before.summary is None:
                after = Seen(before.revision + 1, "", self._summarise(self._run))
            else:
                after = Seen(before.revision, "", before.summary)
        except MegascaleError as error:
            after = Seen(before.revision, str(error), before.summary)
        except Exception as error:  # noqa: BLE001  a thread's boundary: the page says it and goes on
            _log.exception("the run could not be read")
            after = Seen(before.revision, f"{type(error).__name__}: {error}", before.summary)
        if (after.revision, after.why) != (before.revision, before.why):
            self.seen = after
            self._on_change(before, after)

    def _answer(
        self, kept: _Kept, answer: Callable[[Run], Body], run_of: Callable[[], Run]
    ) -> None:
        if not kept.future.set_running_or_notify_cancel():
            return
        began_s = time.monotonic()
        kept.revision = self.seen.revision
        body: Body | None = None
        why: Exception | None = None
        try:
            body = answer(run_of())
        except (MegascaleError, RefusedError) as error:
            why = error
        except Exception as error:  # noqa: BLE001  a question's boundary: its asker is told
            _log.exception("a question could not be answered")
            why = RefusedError(500, f"{type(error).__name__}: {error}")
        now_s = time.monotonic()
        kept.until_s = now_s + KEEP * (now_s - began_s)
        if body is None:
            kept.future.set_exception(why)
        else:
            kept.future.set_result(body)
