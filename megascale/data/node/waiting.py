"""Waiting for a word in shared memory without burning a core.

Pauses double from FIRST_S to MOST_S: what is nearly there is seen within 0.1 ms, and who waits for
long wakes 500 times a second, 0.8 % of a core here. Who is waited for may have died: `look` is
called every LOOK_S, and raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S, MOST_S, LOOK_S = 50e-6, 2e-3, 0.1


def wait_until(is_true: Callable[[], bool], look: Callable[[float], None]) -> None:
    """Return when `is_true`; `look` gets the seconds waited so far and raises when it is enough."""
    since_s = last_look_s = time.monotonic()
    pause_s = FIRST_S
    while not is_true():
        now_s = time.monotonic()
        if now_s - last_look_s >= LOOK_S:
            last_look_s = now_s
            look(now_s - since_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_S)
