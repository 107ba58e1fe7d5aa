"""The recorder against a clock whose times are set by hand and whose device can lag behind."""

from __future__ import annotations

import doctest
import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megascale.events import (
    Anchor,
    ClockKind,
    Completed,
    Dropped,
    Event,
    Incident,
    Issued,
    ProgressReader,
    ProgressWriter,
    Span,
    Step,
    Sums,
    group_id,
)
from megascale.telemetry import recorder as recorder_module
from megascale.telemetry.clock import MonotonicClock
from megascale.telemetry.garbage import GarbagePauses
from megascale.telemetry.hooks import Hook
from megascale.telemetry.recorder import NullRecorder, Recorder


class FakeClock:
    """Time advances by 10 ns a mark; marks later than `done` are not ready."""

    kind: ClockKind = "device"

    def __init__(self) -> None:
        self.now = 0
        self.done: float = float("inf")
        self.num_live = self.num_queries = 0
        self.pending_anchors: list[Anchor] = []

    def begin_step(self) -> None:
        pass

    def mark(self) -> int:
        self.now += 10
        self.num_live += 1
        return self.now

    def ready(self, mark: int) -> bool:
        self.num_queries += 1
        return mark <= self.done

    def interval(self, start: int, end: int) -> tuple[int, int]:
        assert end <= self.done, "asked for a time that is not known"
        return start, end - start

    def release(self, mark: int) -> None:
        self.num_live -= 1

    def reached(self, event: Any, host_ns: int | None) -> None: ...

    def anchor(self) -> None:
        self.pending_anchors.append(
            Anchor(rank=3, clock="device", t_ns=self.now, reading_ns=2, error_ns=3)
        )

    def anchors(self, rank: int) -> list[Anchor]:
        found, self.pending_anchors = self.pending_anchors, []
        return found

    def finish(self) -> None:
        self.done = float("inf")


class Log(Hook):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_step_start(self, step: int) -> None:
        self.calls.append(("start", step))

    def on_step_end(self, step: int) -> None:
        self.calls.append(("end", step))

    def on_step_timed(self, step: Step, sums: Sums) -> None:
        self.calls.append(("timed", step.step, sums.sums))

    def on_span(self, span: Span) -> None:
        self.calls.append(("span", span.name))

    def on_checkpoint(self, step: int, path: str) -> None:
        self.calls.append(("checkpoint", step, path))

    def on_incident(self, incident: Incident) -> None:
        self.calls.append(("incident", incident.name, incident.step, incident.detail))


def make(**options: Any) -> tuple[Recorder, FakeClock, list[Event]]:
    clock, events = FakeClock(), list[Event]()
    return Recorder(clock, events.append, rank=3, **options), clock, events


def launched(event: Event) -> tuple[Event, list[int]]:
    """`event` without the host's times, and these."""
    if isinstance(event, Span) and event.issued_ns is not None:
        return replace(event, issued_ns=None), [event.issued_ns]
    if isinstance(event, Step) and event.issued_ns is not None and event.launch_ns is not None:
        return replace(event, issued_ns=None, launch_ns=None), [event.issued_ns, event.launch_ns]
    return event, []


def test_the_docstrings_example() -> None:
    assert doctest.testmod(recorder_module).attempted > 0
    assert doctest.testmod(recorder_module).failed == 0


def test_a_step_in_every_value() -> None:
    recorder, clock, events = make(span_interval=5)
    before_ns = time.monotonic_ns()
    with recorder.step(5):  # mark 10
        forward = recorder.span("forward", chunk=1, micro_batch=0).start()  # 20
        with recorder.span("tp_all_gather", stream="tensor", group="tensor.0", num_bytes=64):
            pass  # 30, 40
        forward.end()  # 50
        with recorder.span("forward", chunk=1, micro_batch=1):
            pass  # 60, 70
    second = Span(
        rank=3,
        name="forward",
        t0_ns=60,
        dur_ns=10,
        clock="device",
        step=5,
        chunk=1,
        micro_batch=1,
    )
    after_ns = time.monotonic_ns()
    issued_ns = {event.kind: launched(event)[1] for event in events}
    assert before_ns <= issued_ns["span"][0] <= issued_ns["step"][0] <= after_ns
    assert 0 < issued_ns["step"][1] <= after_ns - before_ns
    assert [launched(event)[0] for event in events] == [
        Span(
            rank=3,
            name="tp_all_gather",
            t0_ns=30,
            dur_ns=10,
            clock="device",
            stream="tensor",
            step=5,
            group="tensor.0",
            seq=1,
            num_bytes=64,
        ),
        replace(second, t0_ns=20, dur_ns=30, micro_batch=0),
        second,
        Sums(
            rank=3,
            step=5,
            sums={
                "tp_all_gather": {"total_ns": 10, "count": 1},
                "forward": {"total_ns": 40, "count": 2},
            },
        ),
        Step(rank=3, step=5, t0_ns=10, dur_ns=70, clock="device", sampled=True),
    ]
    assert clock.num_live == 0


def test_sums_of_every_step_and_spans_of_some() -> None:
    recorder, _, events = make(span_interval=4)
    for step in range(1, 9):
        if step == 6:
            recorder.request_spans(2)
        with recorder.step(step), recorder.span("forward"):
            pass
    assert [e.step for e in events if isinstance(e, Sums)] == list(range(1, 9))
    assert [e.step for e in events if isinstance(e, Span)] == [4, 6, 7, 8]
    assert [e.step for e in events if isinstance(e, Step) and e.sampled] == [4, 6, 7, 8]


def test_a_lagging_device_is_never_waited_for() -> None:
    recorder, clock, events = make(span_interval=1)
    clock.done = 0
    for step in (1, 2, 3):  # four marks a step: 10 to 40, 50 to 80, 90 to 120
        with recorder.step(step), recorder.span("forward"):
            pass
    assert events == []
    clock.done = 79  # all of step 2 but its last mark
    recorder.drain()
    assert [e.step for e in events if isinstance(e, Step)] == [1]
    clock.num_queries = 0
    clock.done = 80
    recorder.drain()
    assert [e.step for e in events if isinstance(e, Step)] == [1, 2]
    # Asked: the end of step 2, and the first span of step 3. What was ready is not asked again.
    assert clock.num_queries == 2
    recorder.close()
    assert [e.step for e in events if isinstance(e, Step)] == [1, 2, 3]
    assert clock.num_live == 0


def test_a_full_buffer_drops_and_counts() -> None:
    recorder, clock, events = make(span_interval=1, buffer_events=3)
    clock.done = 0
    for step in (1, 2):
        with recorder.step(step):
            for _ in range(2):
                with recorder.span("forward"):
                    pass
    assert events == [Dropped(rank=3, where="recorder", count=1)]
    recorder.close()
    assert [e.sums for e in events if isinstance(e, Sums)] == [
        {"forward": {"total_ns": 20, "count": 2}},
        {"forward": {"total_ns": 10, "count": 1}},
    ]
    assert clock.num_live == 0
    with recorder.step(3), recorder.span("forward"):
        pass
    assert len([e for e in events if isinstance(e, Dropped)]) == 1  # said once, room again


def test_spans_between_steps_have_no_step() -> None:
    recorder, _, events = make()
    with recorder.span("init"):
        pass
    with recorder.step(1):
        pass
    with recorder.span("checkpoint", host=True):
        pass
    recorder.close()
    init, _, _, checkpoint = events
    assert isinstance(init, Span)
    assert isinstance(checkpoint, Span)
    assert (init.name, init.step, init.clock, init.stream) == ("init", None, "device", "compute")
    assert (checkpoint.step, checkpoint.clock, checkpoint.stream) == (None, "host", "host")


def test_operations_of_a_group_are_numbered() -> None:
    recorder, _, events = make(span_interval=1)
    with recorder.step(1):
        for group in ("a", "b", "a"):
            with recorder.span("all_gather", group=group):
                pass
    assert [(e.group, e.seq) for e in events if isinstance(e, Span)] == [
        ("a", 1),
        ("b", 1),
        ("a", 2),
    ]


def test_unknown_fields_are_refused_where_they_are_given() -> None:
    recorder, _, _ = make()
    with pytest.raises(
        TypeError, match=r"span 'forward' got \['micro'\]; legal fields: \['bucket'"
    ):
        recorder.span("forward", micro=1)


def test_spans_that_end_by_hand_and_on_other_threads() -> None:
    recorder, clock, events = make(span_interval=1)

    def backward() -> None:
        with recorder.span("backward"):
            pass

    with recorder.step(1):
        transfer = recorder.span("send", stream="pipeline", peer=7).start()
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        (span,) = recorder.under_way().open
        assert (span.name, span.fields["peer"]) == ("send", 7)
        transfer.end()
    assert [e.name for e in events if isinstance(e, Span)] == ["backward", "send"]
    assert recorder.under_way().open == ()
    assert clock.num_live == 0


def test_an_error_in_a_span_is_not_swallowed_and_leaves_its_times() -> None:
    log = Log()
    recorder, _, events = make(span_interval=1, hooks=[log])
    with pytest.raises(ValueError, match="planted"), recorder.step(1), recorder.span("forward"):
        raise ValueError("planted")
    assert [e.kind for e in events] == ["span", "sum", "step"]
    assert ("end", 1) not in log.calls


def test_hooks_hear_everything() -> None:
    log = Log()
    recorder, _, events = make(span_interval=1, hooks=[log])
    with recorder.step(1), recorder.span("forward"):
        recorder.incident("nonfinite", parameter="layers.0.norm1.weight")
    recorder.checkpoint(1, "checkpoint/step-1")
    assert log.calls == [
        ("start", 1),
        ("incident", "nonfinite", 1, {"parameter": "layers.0.norm1.weight"}),
        ("span", "forward"),
        ("timed", 1, {"forward": {"total_ns": 10, "count": 1}}),
        ("end", 1),
        ("checkpoint", 1, "checkpoint/step-1"),
    ]
    incidents = [e for e in events if isinstance(e, Incident)]
    assert [(e.name, e.detail) for e in incidents] == [
        ("nonfinite", {"parameter": "layers.0.norm1.weight"}),
        ("checkpoint", {"path": "checkpoint/step-1"}),
    ]


def test_anchors_of_the_clock_are_passed_on() -> None:
    recorder, clock, events = make()
    clock.now = 70
    recorder.anchor()
    recorder.drain()
    assert events == [Anchor(rank=3, clock="device", t_ns=70, reading_ns=2, error_ns=3)]


def test_progress_page(tmp_path: Path) -> None:
    writer, reader = ProgressWriter(tmp_path / "page"), ProgressReader(tmp_path / "page")
    recorder = Recorder(MonotonicClock(), lambda event: None, progress=writer, epoch=4)
    with recorder.step(12):
        with recorder.span("forward", chunk=1, micro_batch=2):
            with recorder.span("tp_all_gather", group="tensor.0"):
                issued = reader.issued()
            assert reader.completed() is None
        assert reader.completed() == Completed(12, "forward", 1, 2)
    assert issued is not None
    expected = Issued(4, 12, "forward", issued.monotonic_ns, 1, 2, group_id("tensor.0"), 1)
    assert issued == expected


@pytest.mark.full
def test_full_garbage_collections_are_spans_wherever_they_come() -> None:
    events: list[Event] = []
    recorder = Recorder(MonotonicClock(), events.append, span_interval=1)
    with GarbagePauses(recorder), recorder.step(1):
        gc.collect(1)
        with recorder.span("forward"), recorder._lock:  # as if it came in the recorder itself
            gc.collect()
    gc.collect()
    recorder.close()
    spans = [event for event in events if isinstance(event, Span)]
    assert [(span.name, span.stream) for span in spans] == [
        ("gc_pause", "host"),
        ("forward", "compute"),
    ]
    assert spans[1].t0_ns < spans[0].t0_ns
    assert 0 < spans[0].dur_ns < spans[1].dur_ns


def test_null_recorder_records_nothing_and_keeps_hooks() -> None:
    log = Log()
    recorder = NullRecorder([log])
    with recorder.step(1), recorder.span("forward", chunk=0):
        recorder.span("send").start().end()
        assert recorder.under_way().open == ()
    recorder.checkpoint(1, "p")
    recorder.close()
    assert log.calls == [("start", 1), ("timed", 1, {}), ("end", 1), ("checkpoint", 1, "p")]


def test_monotonic_clock_measures_time() -> None:
    events: list[Event] = []
    recorder = Recorder(MonotonicClock(), events.append, span_interval=1)
    with recorder.step(1), recorder.span("wait"):
        threading.Event().wait(0.02)
    span, _, step = events
    assert isinstance(span, Span)
    assert isinstance(step, Step)
    assert 20_000_000 <= span.dur_ns < 500_000_000
    assert step.t0_ns <= span.t0_ns
    assert step.dur_ns >= span.dur_ns


def test_what_a_save_moves_is_on_the_page_until_it_is_over(tmp_path: Path) -> None:
    writer, reader = ProgressWriter(tmp_path / "page"), ProgressReader(tmp_path / "page")
    recorder = Recorder(MonotonicClock(), lambda event: None, progress=writer, epoch=4)
    seen = []
    with recorder.step(9), recorder.span("checkpoint", op="save", host=True):
        for _ in range(3):
            before_ns = time.monotonic_ns()
            recorder.moved()
            at = reader.issued()
            assert at is not None
            assert at.monotonic_ns >= before_ns, "its age begins anew"
            seen.append((at.phase, at.step, at.saved))
        recorder.moved(over=True)
    at = reader.issued()
    assert at is not None
    assert seen == [("checkpoint", 9, 1), ("checkpoint", 9, 2), ("checkpoint", 9, 3)]
    assert (at.phase, at.saved) == ("checkpoint", None)
    writer.close()
    reader.close()
