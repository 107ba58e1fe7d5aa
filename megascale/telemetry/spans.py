"""Spans under way, and those that have ended and wait until the device has passed their marks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from megascale.telemetry.clock import Clock, Mark

SPAN_FIELDS = frozenset(
    {"chunk", "micro_batch", "op", "group", "seq", "peer", "num_bytes", "payload", "bucket", "work"}
)


class Reached(Protocol):
    """A moment of the device that the loop has waited for; `event` None: there is no device."""

    event: Any
    reached_ns: int | None


class SpanOwner(Protocol):
    """The recorder, as a span knows it."""

    def opened(self, span: OpenSpan) -> None: ...

    def failed(self, span: OpenSpan, error: BaseException) -> None: ...

    def ended(self, span: OpenSpan, last: Mark) -> None: ...


class OpenSpan:
    """A span under way: a context manager, or `start` and `end` by hand where work is
    asynchronous (each on the stream that does the work)."""

    __slots__ = ("clock", "fields", "first", "name", "recorder", "since_ns", "stream")

    def __init__(
        self, recorder: SpanOwner, clock: Clock, name: str, stream: str, fields: dict[str, Any]
    ) -> None:
        self.recorder, self.clock = recorder, clock
        self.name, self.stream, self.fields = name, stream, fields
        self.first: Mark = None
        self.since_ns = 0

    def start(self) -> OpenSpan:
        self.since_ns = time.monotonic_ns()
        self.recorder.opened(self)
        self.first = self.clock.mark()
        return self

    def end(self) -> None:
        self.recorder.ended(self, self.clock.mark())

    def __enter__(self) -> OpenSpan:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.recorder.failed(self, error)
        self.end()

    def __str__(self) -> str:
        said = ", ".join(f"{key} {value}" for key, value in self.fields.items())
        return f"{self.name} ({said})" if said else self.name


class NoSpan(OpenSpan):
    """The one span of a recorder that records nothing."""

    def start(self) -> OpenSpan:
        return self

    def end(self) -> None:
        pass


@dataclass(slots=True)
class Batch:
    """Ended spans with one fate: those of a step, or those between two steps (`step` None).

    first, last          marks of the step itself
    begun_ns, issued_ns  when the host began to launch the step, and was done
    """

    step: int | None
    sampled: bool
    spans: list[tuple[OpenSpan, Mark]] = field(default_factory=list)
    first: Mark = None
    last: Mark = None
    num_ready: int = 0
    begun_ns: int = 0
    issued_ns: int = 0

    def is_ready(self, clock: Clock) -> bool:
        """Whether all its times are known; `clock` is that of the step. Asks on from where the last
        answer was no. A span may start on one stream and end on another, so both ends are asked; a
        step's own end comes last."""
        while self.num_ready < len(self.spans):
            span, last = self.spans[self.num_ready]
            if not (span.clock.ready(last) and span.clock.ready(span.first)):
                return False
            self.num_ready += 1
        return self.step is None or clock.ready(self.last)


@dataclass(frozen=True)
class UnderWay:
    """What a recorder holds at one moment.

    oldest  what was not emitted longest: another object as soon as it has been
    open    spans that have started and not ended, outermost first
    ended   spans that the host has left and the device may not have, with their end marks, by batch
    latest  number of the last operation that the host has handed out, by group
    """

    clock: Clock
    step: int | None
    oldest: object
    open: tuple[OpenSpan, ...]
    ended: tuple[tuple[tuple[OpenSpan, Mark], ...], ...]
    latest: Mapping[str, int]
