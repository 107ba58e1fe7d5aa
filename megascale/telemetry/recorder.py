"""The recorder: how long every phase of every step took on this rank (MegaScale 5.1).

Work is enclosed in spans, steps in `step`. Time by name is summed and emitted for every step; the
spans themselves only every `span_interval` steps, or on request. Nothing here waits for a device:
a span leaves two marks of the clock behind, and a step's marks are read once the device has passed
them, usually a step or two later. Marks that pile up beyond `buffer_events` are dropped and
counted, never waited for.

It needs nothing of this package's loop. Around somebody else's:

>>> from megascale.telemetry.clock import MonotonicClock
>>> lines = []
>>> recorder = Recorder(MonotonicClock(), lines.append, span_interval=2)
>>> for step in (1, 2):
...     with recorder.step(step):
...         for micro_batch in range(2):
...             with recorder.span("forward", micro_batch=micro_batch):
...                 pass  # model(batch)
>>> recorder.close()
>>> [(line.kind, line.step) for line in lines]
[('sum', 1), ('step', 1), ('span', 2), ('span', 2), ('sum', 2), ('step', 2)]
>>> lines[0].sums["forward"]["count"]
2

On a GPU, hand in `parallel.clock.CudaEventClock()`; for a file a rank, `LineWriter(path)` as sink.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megascale.events import Dropped, Event, Incident, ProgressWriter, Span, Step, Sums
from megascale.telemetry.clock import Clock, Mark, MonotonicClock
from megascale.telemetry.hooks import Hook
from megascale.telemetry.page_reports import PageReports
from megascale.telemetry.spans import SPAN_FIELDS, Batch, NoSpan, OpenSpan, Reached, UnderWay


class Recorder:
    """Times the work of global rank `rank` by `clock` and hands events to `sink`.

    `sink` is called with one event and must not block. With `progress`, every span that starts is
    reported on the progress page too, and on the host's clock every phase that ends.
    """

    def __init__(
        self,
        clock: Clock,
        sink: Callable[[Event], object],
        *,
        rank: int = 0,
        span_interval: int = 10,
        buffer_events: int = 65536,
        hooks: Sequence[Hook] = (),
        progress: ProgressWriter | None = None,
        epoch: int = 0,
    ) -> None:
        self.rank, self.hooks, self.clock = rank, list(hooks), clock
        self._sink, self._host_clock = sink, MonotonicClock()
        self._span_interval, self._buffer_events = span_interval, buffer_events
        self._page = None if progress is None else PageReports(progress, epoch)
        # Backward's spans end on autograd's threads, and one of a garbage collection anywhere.
        self._lock = threading.RLock()
        self._batch = Batch(None, sampled=True)
        self._queue: deque[Batch] = deque()
        self._open: dict[int, OpenSpan] = {}
        self._sequences: dict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))
        self._latest: dict[str, OpenSpan] = {}  # the last one of each group
        self._num_pending = self._num_dropped = self._num_dropped_said = 0
        self._num_requested = 0
        self._step: int | None = None
        self.failed_in: OpenSpan | None = None  # the innermost span that an error left first
        self.on_failure: Callable[[OpenSpan, BaseException], object] | None = None

    def span(
        self, name: str, /, *, stream: str = "compute", host: bool = False, **fields: Any
    ) -> OpenSpan:
        """A span to enter, or to `start` and `end`.

        `fields` are those of `events.Span`: chunk, micro_batch, op, group, seq, peer, num_bytes,
        payload, bucket, work. Operations of a `group` are numbered here unless `seq` is given.
        `host`: the work is the host's (waiting for data, writing a file), whatever the clock of
        the rest.
        """
        if not fields.keys() <= SPAN_FIELDS:
            unknown = sorted(fields.keys() - SPAN_FIELDS)
            raise TypeError(f"span {name!r} got {unknown}; legal fields: {sorted(SPAN_FIELDS)}")
        if fields.get("group") is not None and fields.get("seq") is None:
            fields["seq"] = next(self._sequences[fields["group"]])
        clock = self._host_clock if host else self.clock
        return OpenSpan(self, clock, name, "host" if host else stream, fields)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One step of the loop. Times that have become known are emitted at its end."""
        for hook in self.hooks:
            hook.on_step_start(step)
        requested = self._num_requested > 0
        self._num_requested -= requested
        self._step = step
        self.clock.begin_step()
        batch = Batch(step, sampled=requested or step % self._span_interval == 0)
        batch.begun_ns = time.monotonic_ns()
        batch.first = self.clock.mark()
        self._switch(batch)
        try:
            yield
        finally:
            batch.last = self.clock.mark()
            batch.issued_ns = time.monotonic_ns()
            self._switch(Batch(None, sampled=True))
            self.drain()
        for hook in self.hooks:
            hook.on_step_end(step)

    def request_spans(self, num_steps: int = 1) -> None:
        """Emit the spans of the next `num_steps` steps, whatever the interval."""
        self._num_requested = num_steps

    def incident(self, name: str, /, *, step: int | None = None, **detail: Any) -> None:
        """Something out of the ordinary, of `step` or of the current one."""
        at = self._step if step is None else step
        event = Incident(
            rank=self.rank, name=name, t_ns=time.monotonic_ns(), step=at, detail=detail
        )
        self._sink(event)
        for hook in self.hooks:
            hook.on_incident(event)

    def moved(self, *, over: bool = False) -> None:
        """A save has moved a tensor or a block more, or is `over`: the page says so, and who looks
        at it knows a save that hangs from one that is long. From any thread."""
        if self._page is not None:
            with self._lock:
                self._page.moved(over=over)

    def checkpoint(self, step: int, path: str) -> None:
        """A checkpoint of `step` has been committed at `path`."""
        now_ns = time.monotonic_ns()
        self._sink(
            Incident(
                rank=self.rank, name="checkpoint", t_ns=now_ns, step=step, detail={"path": path}
            )
        )
        for hook in self.hooks:
            hook.on_checkpoint(step, path)

    def under_way(self) -> UnderWay:
        """All that has not been emitted, for who looks on from another thread."""
        with self._lock:
            batches = (*self._queue, self._batch)
            ended = tuple(tuple(batch.spans) for batch in batches)
        latest = {group: span.fields["seq"] for group, span in self._latest.copy().items()}
        opened = tuple(self._open.copy().values())
        return UnderWay(self.clock, self._step, batches[0], opened, ended, latest)

    def reached(self, moment: Reached) -> None:
        """The loop has waited for `moment` of the device: the clock compares itself with it."""
        if moment.event is not None:
            self.clock.reached(moment.event, moment.reached_ns)

    def anchor(self) -> None:
        """Compare the clock with the host's: where the loop waits for the device anyway (a log
        line, a checkpoint), every few minutes, so that ranks stay aligned on one timeline."""
        self.clock.anchor()

    def drain(self, *, wait: bool = False) -> None:
        """Emit what is known, in order. `wait` first waits for the device."""
        if wait:
            self.clock.finish()
        while self._queue and self._queue[0].is_ready(self.clock):
            self._emit(self._queue.popleft())
        for anchor in self.clock.anchors(self.rank):
            self._sink(anchor)
        if self._num_dropped > self._num_dropped_said:
            self._num_dropped_said = self._num_dropped
            self._sink(Dropped(rank=self.rank, where="recorder", count=self._num_dropped))

    def close(self) -> None:
        """Emit all that ended. The sink is closed by who opened it."""
        self._switch(Batch(None, sampled=True))
        self.drain(wait=True)

    def opened(self, span: OpenSpan) -> None:
        """A span of this recorder starts."""
        self._open[id(span)] = span
        if (group := span.fields.get("group")) is not None:
            self._latest[group] = span
        if self._page is not None:
            self._page.started(span, self._step)

    def failed(self, span: OpenSpan, error: BaseException) -> None:
        """An error leaves a span of this recorder; the innermost is told first."""
        if self.failed_in is None:
            self.failed_in = span
            if self.on_failure is not None:
                self.on_failure(span, error)

    def ended(self, span: OpenSpan, last: Mark) -> None:
        """A span of this recorder ends, at `last`."""
        del self._open[id(span)]
        with self._lock:
            full = self._num_pending >= self._buffer_events
            if full:
                self._num_dropped += 1
            else:
                self._num_pending += 1
                self._batch.spans.append((span, last))
        if full:
            span.clock.release(span.first)
            span.clock.release(last)
        if self._page is not None and self.clock.kind == "host":
            self._page.ended(span, self._step)

    def _switch(self, batch: Batch) -> None:
        """From here on spans belong to `batch`; the one before is complete."""
        with self._lock:
            if self._batch.step is not None or self._batch.spans:
                self._queue.append(self._batch)
            self._batch = batch

    def _emit(self, batch: Batch) -> None:
        sums: dict[str, dict[str, int]] = {}
        for span, last in batch.spans:
            t0_ns, dur_ns = self._read(span.clock, span.first, last)
            total = sums.setdefault(span.name, {"total_ns": 0, "count": 0})
            total["total_ns"] += dur_ns
            total["count"] += 1
            if batch.sampled:
                self._emit_span(span, batch.step, t0_ns, dur_ns)
        with self._lock:
            self._num_pending -= len(batch.spans)
        if batch.step is None:
            return
        t0_ns, dur_ns = self._read(self.clock, batch.first, batch.last)
        summed = Sums(rank=self.rank, step=batch.step, sums=sums)
        step = Step(
            rank=self.rank,
            step=batch.step,
            t0_ns=t0_ns,
            dur_ns=dur_ns,
            clock=self.clock.kind,
            sampled=batch.sampled,
            launch_ns=batch.issued_ns - batch.begun_ns,
            issued_ns=batch.issued_ns,
        )
        self._sink(summed)
        self._sink(step)
        for hook in self.hooks:
            hook.on_step_timed(step, summed)

    def _emit_span(self, span: OpenSpan, step: int | None, t0_ns: int, dur_ns: int) -> None:
        event = Span(
            rank=self.rank,
            name=span.name,
            t0_ns=t0_ns,
            dur_ns=dur_ns,
            clock=span.clock.kind,
            stream=span.stream,
            step=step,
            issued_ns=span.since_ns if span.clock.kind == "device" else None,
            **span.fields,
        )
        self._sink(event)
        for hook in self.hooks:
            hook.on_span(event)

    @staticmethod
    def _read(clock: Clock, first: Mark, last: Mark) -> tuple[int, int]:
        times = clock.interval(first, last)
        clock.release(first)
        clock.release(last)
        return times


class NullRecorder(Recorder):
    """Records nothing; hooks still hear of steps, checkpoints and incidents."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        super().__init__(MonotonicClock(), lambda _event: None, hooks=hooks)
        self._no_span = NoSpan(self, self.clock, "", "", {})

    def span(self, _name: str, /, **_fields: Any) -> OpenSpan:
        return self._no_span
