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


def children() -> list[int]:
    """Of this process, zombies too: each must have been collected."""
    return [child.pid for child in psutil.Process(os.getpid()).children(recursive=True)]


def written_pid(file: Path, within_s: float = 20.0) -> int:
    """The number in a file that somebody is about to write."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if file.exists() and (text := file.read_text()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{file} was not written within {within_s} s")
