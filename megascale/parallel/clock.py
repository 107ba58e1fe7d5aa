"""The clock of a recorder on a GPU: CUDA events, read after the fact (MegaScale 5.1).

A mark is an event recorded on the current stream; it costs a few microseconds of the host and
nothing of the device. An event's time exists only as the distance to another one, in float32
milliseconds, so each step has a base event that its marks are measured against: the numbers stay
small and keep their microsecond. The bases form a chain, and the chain is the device's timeline.

`anchor` pins that timeline to the host's CLOCK_MONOTONIC; two anchors some time apart also give the
rate between the two clocks, which differ by up to tens of microseconds a second: without a new
anchor a run of six minutes was off by 3.5 ms on an H200. Between anchors that wait for the device,
the loop's own waits serve (`reached`): it reads the values of each step, and is let go on when the
device has passed the event, but for the time to wake up, so the least of many counts. A loop that
never waits there has a device that is idle, which may be waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megascale.events import Anchor, ClockKind

_TRIES_AN_ANCHOR = 5
_MIN_DRIFT_SPAN_NS = 10_000_000_000  # an anchor errs by about 10 us: 1 ppm over this
_REACHED_SPAN_NS = 10_000_000_000  # of the waits of which the shortest wake-up counts
_LEAST_ERROR_NS = 10_000  # of such an anchor: to wake up takes some us
_IDLE_SPAN_NS = 60_000_000_000  # without an anchor, while the loop never waits for the device


class Event(Protocol):
    """The part of `torch.cuda.Event` that is used; a test hands in its own."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(slots=True, eq=False)
class _Base:
    """The event that a step's marks are measured against, and its place on the device's timeline
    once known; until then `previous` leads to one whose place is."""

    event: Event
    device_ns: int | None = None
    previous: _Base | None = None


@dataclass(frozen=True, slots=True)
class _Mark:
    event: Event
    base: _Base


@dataclass(frozen=True, slots=True)
class _Reading:
    host_ns: int
    device_ns: int
    error_ns: int


def _cuda_event() -> Event:
    return torch.cuda.Event(enable_timing=True)


class CudaEventClock:
    """Times of marks on this process's current device and streams, in ns of the host's clock.

    Making one waits for the device once. Marks may be made on any stream and from any thread.
    """

    kind: ClockKind = "device"

    def __init__(
        self,
        *,
        make_event: Callable[[], Event] = _cuda_event,
        wait_for_device: Callable[[], object] = torch.cuda.synchronize,
        host_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._make_event, self._wait_for_device = make_event, wait_for_device
        self._host_ns = host_ns
        self._pool: list[Event] = []
        self._base = _Base(self._record(), device_ns=0)
        self._first = self._latest = self._read_both()
        self._new_anchors = [self._latest]
        self._placed = self._base  # the newest whose place is known
        self._waits: list[
            tuple[int, _Reading]
        ] = []  # how much later than expected; two, least first

    def begin_step(self) -> None:
        # A base is not taken from the pool nor put back: marks of its step may outlive the step.
        event = self._make_event()
        event.record()
        self._base = _Base(event, previous=self._base)

    def mark(self) -> _Mark:
        return _Mark(self._record(), self._base)

    def ready(self, mark: _Mark) -> bool:
        base: _Base | None = mark.base
        while base is not None and base.device_ns is None:
            if not base.event.query():
                return False
            base = base.previous
        return mark.event.query()

    def interval(self, start: _Mark, end: _Mark) -> tuple[int, int]:
        """(start, duration) in ns; the duration straight from the two events."""
        device_ns = self._place(start.base) + _elapsed_ns(start.base.event, start.event)
        return self._to_host(device_ns), _elapsed_ns(start.event, end.event)

    def release(self, mark: _Mark) -> None:
        self._pool.append(mark.event)

    def anchor(self) -> None:
        self._latest = self._read_both()
        self._new_anchors.append(self._latest)
        self._waits = []

    def reached(self, event: Event, host_ns: int | None) -> None:
        since_ns = self._host_ns() - self._latest.host_ns
        if host_ns is None:
            if since_ns > _IDLE_SPAN_NS and not self._waits:
                self.anchor()
            return
        place = self._placed.device_ns
        assert place is not None, "a placed base has its place"
        device_ns = place + _elapsed_ns(self._placed.event, event)
        reading = _Reading(host_ns, device_ns, _LEAST_ERROR_NS)
        self._waits.append((host_ns - self._to_host(device_ns), reading))
        self._waits = sorted(self._waits, key=lambda wait: wait[0])[:2]
        if since_ns > _REACHED_SPAN_NS and len(self._waits) == 2:
            (least_ns, best), (next_ns, _) = self._waits
            error_ns = max(_LEAST_ERROR_NS, next_ns - least_ns)
            self._latest = _Reading(best.host_ns, best.device_ns, error_ns)
            self._new_anchors.append(self._latest)
            self._waits = []

    def anchors(self, rank: int) -> list[Anchor]:
        readings, self._new_anchors = self._new_anchors, []
        return [
            Anchor(
                rank=rank,
                clock="device",
                t_ns=reading.host_ns,
                reading_ns=reading.device_ns,
                error_ns=reading.error_ns,
                drift_ppm=None if drift is None else round(drift * 1e6, 3),
            )
            for reading in readings
            for drift in [self._drift(reading)]
        ]

    def finish(self) -> None:
        self.anchor()  # which waits for all streams

    def _record(self) -> Event:
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._make_event()
        event.record()
        return event

    def _place(self, base: _Base) -> int:
        """ns of `base` on the device's timeline; all bases up to it must be ready."""
        chain = [base]
        while chain[-1].device_ns is None:
            previous = chain[-1].previous
            assert previous is not None, "the first base has its place from the start"
            chain.append(previous)
        place = chain.pop().device_ns
        assert place is not None
        for link in reversed(chain):
            assert link.previous is not None
            place += _elapsed_ns(link.previous.event, link.event)
            link.device_ns, link.previous = place, None
            self._placed = link
        return place

    def _read_both(self) -> _Reading:
        """Both clocks at one instant: of several tries the one with the least time around it."""
        self._wait_for_device()
        place = self._place(self._base)
        best: _Reading | None = None
        for _ in range(_TRIES_AN_ANCHOR):
            before_ns = self._host_ns()
            event = self._record()
            event.synchronize()
            error_ns = (self._host_ns() - before_ns) // 2
            if best is None or error_ns < best.error_ns:
                device_ns = place + _elapsed_ns(self._base.event, event)
                best = _Reading(before_ns + error_ns, device_ns, error_ns)
            self._pool.append(event)
        assert best is not None
        return best

    def _drift(self, reading: _Reading) -> float | None:
        """How much faster the device's clock runs than the host's, as a fraction, from the first
        anchor to `reading`; None while they are too near."""
        span_ns = reading.host_ns - self._first.host_ns
        if span_ns < _MIN_DRIFT_SPAN_NS:
            return None
        return (reading.device_ns - self._first.device_ns) / span_ns - 1

    def _to_host(self, device_ns: int) -> int:
        rate = 1 + (self._drift(self._latest) or 0.0)
        return self._latest.host_ns + round((device_ns - self._latest.device_ns) / rate)


def _elapsed_ns(start: Event, end: Event) -> int:
    return round(start.elapsed_time(end) * 1e6)
