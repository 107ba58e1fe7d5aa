"""The thread that holds the run: refreshes, questions, what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megascale.errors import DataError
from megascale.telemetry.dashboard import live
from megascale.telemetry.dashboard.answers import Body, RefusedError
from megascale.telemetry.dashboard.live import KEEP, MOST_ASKED, LiveRun, Seen
from megascale.telemetry.store.run import Run
from tests.telemetry.dashboard.waiting import until


class FakeRun:
    """As much of a run as the thread itself uses."""

    def __init__(self) -> None:
        self.news: list[Any] = []
        self.closed = False

    def __enter__(self) -> FakeRun:
        return self

    def again(self) -> FakeRun:
        return FakeRun()

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def refresh(self) -> bool:
        new = self.news.pop(0) if self.news else False
        if isinstance(new, Exception):
            raise new
        return bool(new)


class Held:
    """A `LiveRun` over a fake, with what it told."""

    def __init__(self, open_run: Callable[[], Run] | None = None) -> None:
        self.run, self.told = FakeRun(), list[Seen]()
        self.live = LiveRun(
            open_run or (lambda: cast(Run, self.run)),
            lambda _run: {"n": len(self.told)},
            lambda _before, after: self.told.append(after),
            refresh_s=0.01,
        )

    def __enter__(self) -> Held:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.close()


def test_a_revision_for_each_news_and_none_without() -> None:
    with Held() as held:
        until(lambda: held.live.seen.revision == 1, "opened")
        held.run.news = [False, True, False, True]
        until(lambda: held.live.seen.revision == 3, "two more")
        assert [seen.revision for seen in held.told] == [1, 2, 3]
    assert held.run.closed


def test_a_run_that_comes_later_is_waited_for_and_the_reason_is_told_once() -> None:
    there = threading.Event()
    run = FakeRun()

    def open_run() -> Run:
        if not there.is_set():
            raise DataError("nothing is recorded yet")
        return cast(Run, run)

    with Held(open_run) as held:
        until(lambda: held.live.seen.why == "nothing is recorded yet", "why")
        with pytest.raises(RefusedError, match="nothing is recorded yet"):
            held.live.ask("x", lambda _run: Body(b""))
        there.set()
        until(lambda: held.live.seen.revision == 1, "opened")
    assert [seen.why for seen in held.told] == ["nothing is recorded yet", ""]


def test_what_cannot_be_refreshed_keeps_what_was_seen_and_says_why() -> None:
    with Held() as held:
        until(lambda: held.live.seen.revision == 1, "opened")
        held.run.news = [OSError("stale file handle"), False]
        until(lambda: len(held.told) == 3, "told and over")
    assert [(s.revision, s.why) for s in held.told] == [
        (1, ""),
        (1, "OSError: stale file handle"),
        (1, ""),
    ]
    assert held.told[1].summary == {"n": 0}


def test_the_same_question_of_a_revision_is_answered_once() -> None:
    asked: list[Run] = []

    def answer(run: Run) -> Body:
        asked.append(run)
        return Body(b"1")

    with Held() as held:
        until(lambda: held.live.seen.revision == 1, "opened")
        first = held.live.ask("spans", answer).result(5)
        assert held.live.ask("spans", answer).result(5) is first
        assert held.live.ask("others", answer).result(5) is not first
        held.run.news = [True]
        until(lambda: held.live.seen.revision == 2, "news")
        assert held.live.ask("spans", answer).result(5) is not first
    assert len(asked) == 3


def test_an_answer_that_took_long_is_given_for_longer_though_the_run_went_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that the test sets forward: five seconds pass in the answer."""
    passed_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s[0])
    monkeypatch.setattr(live, "time", clock)

    def slowly(_run: Run) -> Body:
        passed_s[0] += 5.0
        return Body(b"1")

    with Held() as held:
        until(lambda: held.live.seen.revision == 1, "opened")
        first = held.live.ask("heat map", slowly).result(5)
        held.run.news = [True]
        until(lambda: held.live.seen.revision == 2, "news")
        assert held.live.ask("heat map", slowly).result(5) is first
        passed_s[0] += 5.0 * KEEP
        assert held.live.ask("heat map", slowly).result(5) is not first


def test_a_long_question_holds_up_no_short_one() -> None:
    held_up = threading.Event()
    runs: list[Run] = []

    def wait(run: Run) -> Body:
        runs.append(run)
        assert held_up.wait(10)
        return Body(b"long")

    def at_once(run: Run) -> Body:
        runs.append(run)
        return Body(b"short")

    with Held() as held:
        until(lambda: held.live.seen.revision == 1, "opened")
        summary = held.live.ask("summary", wait, is_long=True)
        until(summary.running, "the summary is being made")
        assert held.live.ask("heat map", at_once).result(5).raw == b"short"
        assert not summary.done()
        held_up.set()
        assert summary.result(5).raw == b"long"
        held.live.ask("late", at_once, is_long=True).result(5)
    assert runs[0] is runs[2]
    assert runs[0] is not runs[1]
    assert all(cast(FakeRun, run).closed for run in runs)


def test_too_many_questions_are_refused_and_an_error_reaches_its_asker_alone() -> None:
    held_up = threading.Event()

    def wait(_run: Run) -> Body:
        held_up.wait(10)
        return Body(b"")

    def fail(_run: Run) -> Body:
        raise ZeroDivisionError("by nothing")

    with Held() as held:
        until(lambda: held.live.seen.revision == 1, "opened")
        futures = [held.live.ask(0, wait)]
        until(futures[0].running, "the first is being answered")
        futures += [held.live.ask(k, wait) for k in range(1, MOST_ASKED + 1)]
        with pytest.raises(RefusedError, match="questions wait already"):
            held.live.ask("one more", wait)
        held_up.set()
        for future in futures:
            future.result(10)
        with pytest.raises(RefusedError, match="ZeroDivisionError: by nothing"):
            held.live.ask("fails", fail).result(5)
        assert held.live.ask("works", wait).result(5).raw == b""
