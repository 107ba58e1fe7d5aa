"""Waiting for something to come true, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(true: Callable[[], Any], what: str, timeout_s: float = 15.0) -> Any:
    """The first value of `true` that is true; AssertionError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := true()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return value
