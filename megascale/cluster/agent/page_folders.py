"""Whose folder of pages and memory slots in shared memory is whose, and which are nobody's.

An agent holds a lock on the file `owner` of its folder as long as it lives. A folder whose lock is
free was left by one that died together with its watchdog (SIGKILL to all of them, as an eviction
does it): the next agent of any run on the host takes it away, and so does the local backend when it
gives a machine up. A lock, because pids mean nothing between containers that share /dev/shm.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "megascale-"
OWNER = "owner"


def make(folder: Path) -> int:
    """Make `folder` and own it while the descriptor that this gives is open. Raises OSError."""
    folder.mkdir(mode=0o700)
    new = folder / f"{OWNER}.new"
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    new.rename(folder / OWNER)  # no moment in which the file is there and its lock is free
    return descriptor


def clear_dead(within: Path | None = None) -> list[Path]:
    """Take away the folders (in shared memory) of agents that are dead; those without a file
    `owner` stay."""
    cleared = []
    for folder in (within or SHARED_MEMORY).glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(folder / OWNER, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # another user's, or of another version
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            cleared.append(folder)
        finally:
            os.close(descriptor)
    return cleared
