"""What a recorder measures with: the interface of a clock, and the host's monotonic one.

A clock hands out marks now and says later, when the work before them is done, when they were. For
the host, now and later are the same; `parallel/clock.py` has the one of CUDA events, which this
layer cannot see. No method but
`anchor` and `finish` may wait for a device.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from megascale.events import Anchor, ClockKind

Mark = Any  # opaque: only the clock that made it knows


class Clock(Protocol):
    """Times of marks, in ns of the host's CLOCK_MONOTONIC."""

    kind: ClockKind

    def begin_step(self) -> None:
        """A step starts here on the current stream."""

    def mark(self) -> Mark:
        """This point of the current stream's work."""

    def ready(self, mark: Mark) -> bool:
        """Whether the work before `mark` is done, so that `interval` may be asked."""

    def interval(self, start: Mark, end: Mark) -> tuple[int, int]:
        """(start, duration) in ns of two marks that are ready."""

    def release(self, mark: Mark) -> None:
        """`mark` will not be asked for again."""

    def anchor(self) -> None:
        """Compare with the host's clock. This waits for the device: call it where the loop waits
        anyway."""

    def reached(self, event: Any, host_ns: int | None) -> None:
        """The loop needed what lies before `event` of the device, and was there at `host_ns`; None:
        the device had passed it before the loop asked. A comparison that costs nothing."""

    def anchors(self, rank: int) -> list[Anchor]:
        """The comparisons made since the last call."""

    def finish(self) -> None:
        """Wait until every mark is ready."""


class MonotonicClock:
    """CLOCK_MONOTONIC of the host: marks are their own times."""

    kind: ClockKind = "host"

    def begin_step(self) -> None:
        pass

    def mark(self) -> int:
        return time.monotonic_ns()

    def ready(self, mark: int) -> bool:  # noqa: ARG002 - a mark of the host is always ready
        return True

    def interval(self, start: int, end: int) -> tuple[int, int]:
        return start, end - start

    def release(self, mark: int) -> None:
        pass

    def anchor(self) -> None:
        pass

    def reached(self, event: Any, host_ns: int | None) -> None:
        pass

    def anchors(self, rank: int) -> list[Anchor]:  # noqa: ARG002 - it is the host's clock
        return []

    def finish(self) -> None:
        pass
