"""Copies for partners go when the network is idle: a sender asks before each chunk.

The end of a step is when gradients are reduced and parameters gathered, over the same network: that
is *busy*. What else a step does (forward, backward, data, validation, hosts that wait) counts as
idle: transfers between pipeline stages are small, and a chunk takes milliseconds. All waits of one
copy together have a bound: a copy that is late delays the next save, and a state without a copy is
worse than a slower step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megascale.events import ProgressReader

BUSY_PHASES = frozenset({"grad_sync", "optimizer", "param_gather"})
_POLL_S = 0.002


def never_busy() -> bool:
    return False


class PageSignal:
    """Is the step of this rank in its end, full of communication? From its own progress page: what
    the host handed out last. On a GPU the device is behind the host by less than a step, so there a
    signal of the device's is better where somebody has one."""

    def __init__(self, page: Path) -> None:
        self._reader = ProgressReader(page)

    def __call__(self) -> bool:
        issued = self._reader.issued(attempts=1)
        return issued is not None and issued.phase in BUSY_PHASES


class Pacer:
    """Waits before chunks while the network is busy, in all at most `most_s` a copy.

    waited_s  of the copy under way, or of the last one
    """

    def __init__(
        self,
        network_is_busy: Callable[[], bool] = never_busy,
        *,
        most_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._is_busy, self._most_s = network_is_busy, most_s
        self._clock, self._sleep = clock, sleep
        self.waited_s = 0.0

    def start(self) -> None:
        """A copy begins."""
        self.waited_s = 0.0

    def wait(self) -> None:
        """Before a chunk."""
        since = self._clock()
        waited_before = self.waited_s
        while self.waited_s < self._most_s and self._is_busy():
            self._sleep(_POLL_S)
            self.waited_s = waited_before + self._clock() - since
