"""One driver a run folder: a file with who holds it, and a lock of the system on it.

A driver that was stopped for a while (or whose file was taken away on a shared disk where locks do
not work) finds another owner in the file and acts no more. Epochs fence what it may have sent.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from megascale.env import hostname
from megascale.errors import LaunchError


class FencedDriverError(LaunchError):
    """Another driver has the run folder by now: this one ends without touching ranks."""


class DriverLock:
    """Held from construction to `release`, or to the end of the process, however it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._owner = f"{hostname()} process {os.getpid()} since {started} {secrets.token_hex(8)}\n"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = " ".join(path.read_text().split()[:5]) or "another process"
            os.close(self._descriptor)
            raise LaunchError(
                f"{path.parent} has a driver: {holder}; stop the job with its API or end that "
                "process first, or start another run with --set job.run_dir=ANOTHER"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, self._owner.encode())
        os.fsync(self._descriptor)

    @property
    def is_held(self) -> bool:
        """The file is still this driver's."""
        try:
            return self.path.read_text() == self._owner
        except OSError:
            return False

    def check(self) -> None:
        if not self.is_held:
            raise FencedDriverError(
                f"{self.path} names another driver; this one is stale and ends, the other has the "
                "job"
            )

    def release(self) -> None:
        os.close(self._descriptor)
