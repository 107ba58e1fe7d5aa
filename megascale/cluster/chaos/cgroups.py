"""cgroup v1: a process that nobody can kill until it is thawed, and a real out-of-memory killer.

A frozen process reads D in /proc and takes no signal, SIGKILL included, until its group is thawed:
like one that sits in a dead driver of the kernel. Both are undone by `Group.remove`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megascale.errors import LaunchError

ROOT = Path("/sys/fs/cgroup")
REMOVE_S = 5.0


def is_writable(controller: str) -> bool:
    """Whether this user may make a group there; v2 has no such folders."""
    return os.access(ROOT / controller, os.W_OK) and (ROOT / controller / "cgroup.procs").exists()


class Group:
    """A cgroup of our own. Raises LaunchError where it cannot be made."""

    def __init__(self, controller: str, name: str) -> None:
        self.folder = ROOT / controller / f"megascale-chaos-{os.getpid()}-{name}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise LaunchError(
                f"{self.folder} cannot be made ({error.strerror}); this fault needs a writable "
                f"cgroup v1 {controller} controller"
            ) from None
        self._is_frozen = False

    def take(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                (self.folder / "cgroup.procs").write_text(str(pid))

    def freeze(self) -> None:
        self._is_frozen = True
        (self.folder / "freezer.state").write_text("FROZEN")

    def limit_memory(self, num_bytes: int) -> None:
        (self.folder / "memory.limit_in_bytes").write_text(str(num_bytes))

    def remove(self) -> None:
        """Thaw, let everybody go, and remove it. Idempotent."""
        if not self.folder.exists():
            return
        if self._is_frozen:
            (self.folder / "freezer.state").write_text("THAWED")
        deadline_s = time.monotonic() + REMOVE_S
        while self.folder.exists():
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (self.folder.parent / "cgroup.procs").write_text(pid)
            with suppress(OSError):
                self.folder.rmdir()
            if time.monotonic() > deadline_s:
                raise LaunchError(f"{self.folder} is still in use; remove it by hand: rmdir")
            time.sleep(0.02)
