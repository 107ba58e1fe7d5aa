"""What the kernel says of this node: its log, and its counter of processes ended for memory.

Both may be closed to this user or in this container; then they say nothing.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from megascale.cluster.agent.log_reader import Match
from megascale.cluster.agent.log_rules import classify

MOST_RECORDS = 256  # a read
_RECORD_BYTES = 8192
_KILLED = re.compile(r"Killed process (\d+)")


class KernelLog:
    """Lines since it was opened, from /dev/kmsg or a file that stands in for it."""

    def __init__(self, path: Path) -> None:
        self._held = b""
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            self._descriptor = -1

    def read(self) -> list[Match]:
        """What has come and means something."""
        if self._descriptor < 0:
            return []
        matches = []
        for line in self._lines():
            text = line.partition(b";")[2] if re.match(rb"\d+,\d+,\d+,", line) else line
            said = text.decode(errors="replace")
            rule = classify(said)
            if rule is not None:
                matches.append(Match(rule, said, time.time_ns()))
        return matches

    def _lines(self) -> list[bytes]:
        lines: list[bytes] = []
        for _ in range(MOST_RECORDS):
            try:
                data = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not data:
                break
            *whole, self._held = (self._held + data).split(b"\n")
            lines += whole
        return lines

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def killed_pid(match: Match) -> int | None:
    """The process that the kernel ended for memory, where the line names one."""
    found = _KILLED.search(match.line) if match.rule.name == "kernel_out_of_memory" else None
    return int(found[1]) if found else None


class OutOfMemoryCounter:
    """oom_kill of a process's memory cgroup (v1 or v2). `rose_s`: when it was last seen to grow."""

    def __init__(self, pid: int, cgroups: Path) -> None:
        self._pid, self._cgroups = pid, cgroups
        self._file: Path | None = None
        self._count: int | None = None
        self.rose_s: float | None = None

    def look(self) -> None:
        """Read the counter again, that of the last cgroup first: a dead process is in none."""
        if self._file is not None:
            count = _oom_kills(self._file)
            if count is not None and self._count is not None and count > self._count:
                self.rose_s = time.monotonic()
            self._count = count
        file = self._find()
        if file is not None and file != self._file:
            self._file, self._count = file, _oom_kills(file)

    def _find(self) -> Path | None:
        try:
            lines = Path(f"/proc/{self._pid}/cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                folders = (self._cgroups / "memory" / path.lstrip("/"), self._cgroups / "memory")
                name = "memory.oom_control"
            elif not controllers:
                folders = (self._cgroups / path.lstrip("/"), self._cgroups)
                name = "memory.events"
            else:
                continue
            for folder in folders:  # inside a container the path may be the host's
                if (folder / name).exists():
                    return folder / name
        return None


def _oom_kills(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
