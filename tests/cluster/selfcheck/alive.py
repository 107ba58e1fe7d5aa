"""Is a process still there, and have we children."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def gone(pid: int, within_s: float = 5.0) -> bool:
    """It is no more, or a zombie that its new parent has not collected."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


_before: set[int] = set()  # what other tests of this process have: servers that fork ranks, say


def begin() -> None:
    """At a test's start: what lives, or waits to be collected, is none of its."""
    _before.clear()
    _before.update(_below())


def children() -> list[int]:
    """Of this process since the test began, zombies too: each must have been collected."""
    return [pid for pid in _below() if pid not in _before]


def _below() -> list[int]:
    return [child.pid for child in psutil.Process(os.getpid()).children(recursive=True)]


def written_pid(file: Path, within_s: float = 20.0) -> int:
    """The number in a file that somebody is about to write."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if file.exists() and (text := file.read_text()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{file} was not written within {within_s} s")
