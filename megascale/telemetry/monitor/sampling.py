"""Samples ports on a fixed grid of times, in memory (MegaScale 5.1).

Nothing is written or allocated in the loop but the numbers themselves, because a pause of a
millisecond would be a hole. A tick that comes too late is not made up for: the next one on the grid
is. What was achieved is part of the result.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megascale.telemetry.monitor.ports import MARKS_EVERY, Source

_SPIN_NS = 100_000  # a sleep is longer than asked by about so much


@dataclass
class Series:
    """One port's samples: times in ns of CLOCK_MONOTONIC, bytes so far, marks so far."""

    port: str
    speed_bytes_per_s: float | None
    t_ns: array[int] = field(default_factory=lambda: array("q"))
    sent: array[int] = field(default_factory=lambda: array("q"))
    received: array[int] = field(default_factory=lambda: array("q"))
    marks: array[int] = field(default_factory=lambda: array("q"))  # -1: not read at that time


@dataclass(frozen=True)
class Achieved:
    """How well the grid was kept; intervals between samples that were taken, in ms."""

    num_samples: int
    asked_ms: float
    median_ms: float
    p99_ms: float
    longest_ms: float
    missed: int  # ticks of the grid without a sample
    cpu_share: float  # of one core


def sample(
    ports: Sequence[Source],
    *,
    interval_s: float,
    seconds: float,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[list[Series], Achieved]:
    """Sample for `seconds`. A port that goes away ends its series."""
    series = [Series(port.name, port.speed_bytes_per_s) for port in ports]
    live = list(zip(ports, series, strict=True))
    ticks = array("q")
    interval_ns = int(interval_s * 1e9)
    was_enabled = gc.isenabled()
    gc.disable()
    cpu_s, began_ns = time.process_time(), time.monotonic_ns()
    until_ns, tick_ns, number = began_ns + int(seconds * 1e9), began_ns, 0
    try:
        while tick_ns < until_ns and not stopped():
            _wait_until(tick_ns)
            ticks.append(time.monotonic_ns())
            with_marks = number % MARKS_EVERY == 0
            live = [one for one in live if _take(*one, with_marks=with_marks)]
            number += 1
            tick_ns += interval_ns * max(1, -(-(time.monotonic_ns() - tick_ns) // interval_ns))
    finally:
        if was_enabled:
            gc.enable()
    wall_s = (time.monotonic_ns() - began_ns) / 1e9
    share = (time.process_time() - cpu_s) / max(wall_s, 1e-9)
    return series, _achieved(ticks, interval_s, seconds, share)


def _wait_until(tick_ns: int) -> None:
    left_ns = tick_ns - time.monotonic_ns()
    if left_ns > _SPIN_NS:
        time.sleep((left_ns - _SPIN_NS) / 1e9)


def _take(port: Source, series: Series, *, with_marks: bool) -> bool:
    """False: the port is gone."""
    try:
        t_ns = time.monotonic_ns()
        sent, received = port.bytes_moved()
        marks = port.marks() if with_marks else None
    except (OSError, ValueError):
        return False
    series.t_ns.append(t_ns)
    series.sent.append(sent)
    series.received.append(received)
    series.marks.append(-1 if marks is None else marks)
    return True


def _achieved(ticks: array[int], interval_s: float, seconds: float, share: float) -> Achieved:
    gaps = sorted((after - before) / 1e6 for before, after in pairwise(ticks))
    gaps = gaps or [0.0]
    return Achieved(
        num_samples=len(ticks),
        asked_ms=interval_s * 1e3,
        median_ms=round(gaps[len(gaps) // 2], 4),
        p99_ms=round(gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], 4),
        longest_ms=round(gaps[-1], 4),
        missed=max(0, round(seconds / interval_s) - len(ticks)),
        cpu_share=round(share, 4),
    )
