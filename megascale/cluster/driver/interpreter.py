"""The interpreter of a driver that answers some thousand heartbeats a second beside deciding.

Two of its habits make them late. A pass of the collector over the newest 50,000 objects took 150 ms
at 12,288 ranks, came every three seconds and found nothing, because messages make no circles: there
is one pass in COLLECT_S instead, over everything. And a thread that computes gives the lock up only
5 ms after it is asked to, and an answer asks several times: SWITCH_S.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_S = 600.0
SWITCH_S = 5e-4


@contextmanager
def answering() -> Iterator[Callable[[float], None]]:
    """Inside it the habits are others. Gives what is to be called with the time, now and then."""
    collects, switch_s = gc.isenabled(), sys.getswitchinterval()
    last_s = time.monotonic()

    def look(now_s: float) -> None:
        nonlocal last_s
        if now_s - last_s >= COLLECT_S:
            last_s = now_s
            gc.collect()

    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield look
    finally:
        sys.setswitchinterval(switch_s)
        if collects:
            gc.enable()
