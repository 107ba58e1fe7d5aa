"""Processes as /proc shows them. A process is its pid *and* its start: pids are given again.

Only `stat` is read of every process. `environ` waits for the lock of the process's memory, which a
process that hangs in the kernel may hold, so it is read only where that cannot be (`is_marked`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DEAD = "ZXx"

Identity = tuple[int, int]  # pid, start in clock ticks since boot


class Stat(NamedTuple):
    """One line of /proc/PID/stat, what is needed of it."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int
    rss_bytes: int

    @property
    def identity(self) -> Identity:
        return self.pid, self.start_ticks

    @property
    def is_alive(self) -> bool:
        """A zombie is dead: it only waits for somebody to ask."""
        return self.state not in _DEAD


def read_stat(pid: int) -> Stat | None:
    """The process now; None where there is none (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    fields = line[line.rfind(b")") + 2 :].split()  # the name before may hold blanks and brackets
    return Stat(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
        rss_bytes=max(0, int(fields[21])) * _PAGE_BYTES,
    )


def all_stats() -> dict[int, Stat]:
    """Every process of the node by pid: about 15 us each."""
    stats = (read_stat(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return {stat.pid: stat for stat in stats if stat is not None}


def is_alive(identity: Identity) -> bool:
    stat = read_stat(identity[0])
    return stat is not None and stat.identity == identity and stat.is_alive


def below(stats: Mapping[int, Stat], roots: Iterable[int]) -> set[int]:
    """Pids of all descendants of `roots`, without the roots."""
    children: dict[int, list[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    found: set[int] = set()
    left = list(roots)
    while left:
        for child in children.get(left.pop(), ()):
            if child not in found:
                found.add(child)
                left.append(child)
    return found


def marker_of(stat: Stat, marker: bytes) -> bytes | None:
    """The variable of the process's environment that begins with `marker`, where it can be read."""
    if not stat.is_alive or stat.state == "D":
        return None
    with suppress(OSError):
        for variable in (_PROC / str(stat.pid) / "environ").read_bytes().split(b"\0"):
            if variable.startswith(marker):
                return variable
    return None


def send(identity: Identity, signum: int) -> bool:
    """Signal the process, never another one that has its pid. False where it is gone."""
    pid, _ = identity
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        stat = read_stat(pid)
        if stat is None or stat.identity != identity:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def own_line() -> set[int]:
    """This process and its ancestors, which no sweep may touch."""
    line, pid = {0, 1}, os.getpid()
    while pid not in line:
        line.add(pid)
        stat = read_stat(pid)
        pid = stat.parent if stat else 0
    return line


def boot_id() -> str:
    """Which start of the kernel this is: pids of another mean nothing."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def has_dead_child() -> bool:
    """Whether a child of this process waits to be collected; it is not."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False
