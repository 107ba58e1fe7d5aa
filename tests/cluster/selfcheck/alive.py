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
    """Of this process and theirs, zombies too: each must have been collected. Not the servers that
    fork ranks for other tests of this process, and what these fork."""
    found = []
    for child in psutil.Process(os.getpid()).children():
        if not _is_of_multiprocessing(child):
            found += [child.pid, *(one.pid for one in child.children(recursive=True))]
    return found


def _is_of_multiprocessing(process: psutil.Process) -> bool:
    try:
        return any("from multiprocessing." in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def written_pid(file: Path, within_s: float = 20.0) -> int:
    """The number in a file that somebody is about to write."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if file.exists() and (text := file.read_text()):
            return int(text)
        time.sleep(0.02)
    raise AssertionError(f"{file} was not written within {within_s} s")
