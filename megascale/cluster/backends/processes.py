"""Processes of this machine by a mark in their environment: start, find, end.

A rank runs in a session of its own and, once its agent is dead, as a child of pid 1, so neither
process groups nor the tree find it. All that an agent starts inherits the variable MARK with the
job and the machine; `members` reads it from /proc, and takes the marked ones' children too, should
one have emptied its environment. Signals go through pidfds, so that a pid that was given to another
process in between is not hit. Linux only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megascale.cluster.backends.base import BackendError

MARK = "BACKEND_MACHINE"  # not MEGASCALE_*: those are the trainers' and closed (env.py)
POLL_S = 0.05  # a look at /proc costs some milliseconds
_DEFAULT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD)


def start(argv: Sequence[str], environment: Mapping[str, str], log: str) -> int:
    """Start `argv` in a session of its own, output appended to `log`; its pid.

    Not a Popen: the process must outlive this one, and nothing here waits for it.
    """
    out = (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return os.posix_spawnp(
            argv[0],
            list(argv),
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                out,
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=_DEFAULT,
        )
    except OSError as error:
        raise BackendError(
            f"the agent's command {argv[0]!r} did not start: {error.strerror}; give one that exists"
        ) from None


def start_ticks(pid: int) -> int | None:
    """When `pid` started, in ticks since boot; None if there is no such process, or a dead one.

    A pid and this number are one process: pids come back, the pair does not.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def exit_reason(pid: int) -> str:
    """How a child of this process ended, if it is one and did; "" otherwise. Reaps it."""
    with suppress(ChildProcessError):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    return ""


def members(prefix: str) -> dict[str, dict[int, int]]:
    """By mark, for marks that start with `prefix`: living processes and their descendants.

    Returns mark -> pid -> start ticks.
    """
    parents: dict[int, int] = {}
    marks: dict[int, str] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX":
            continue
        parents[pid] = int(fields[1])
        mark = _mark_of(pid)
        if mark.startswith(prefix) and pid != os.getpid():
            marks[pid] = mark
    found: dict[str, dict[int, int]] = {}
    for pid in parents:
        nearest = _marked_ancestor(pid, marks, parents)
        if nearest is not None and (ticks := start_ticks(pid)) is not None:
            found.setdefault(marks[nearest], {})[pid] = ticks
    return found


def end(
    agents: Mapping[str, int | None], prefix: str, *, grace_s: float, kill_s: float
) -> dict[str, list[int]]:
    """End all that carries a mark of `agents` (mark -> pid of the agent, None if it is gone).

    `prefix` begins all marks. Agents are asked to end and have `grace_s`; what is left without
    its agent, or after that, is killed and has `kill_s`. Returns pids that are left, by mark.
    """
    found = members(prefix)
    known = {mark: dict(found.get(mark, {})) for mark in agents}
    for mark, pid in agents.items():
        if pid is not None and (ticks := start_ticks(pid)) is not None:
            known[mark][pid] = ticks
            _signal(pid, ticks, signal.SIGTERM)
    asked = time.monotonic()
    # Twice: a process that forked and ended during one look is in none of it, its child neither.
    while left := _still_there(known, prefix) or _still_there(known, prefix):
        waited_s = time.monotonic() - asked
        for mark, pids in left.items():
            if waited_s < grace_s and agents[mark] in pids:
                continue
            for pid, ticks in pids.items():
                _signal(pid, ticks, signal.SIGKILL)
        if waited_s > grace_s + kill_s:
            break
        time.sleep(POLL_S)
    return {mark: sorted(pids) for mark, pids in left.items()}


def _still_there(known: dict[str, dict[int, int]], prefix: str) -> dict[str, dict[int, int]]:
    """Those of `known` that live, by mark; what carries their marks by now is added to it.

    Remembered, because an unmarked child is found only as long as its parent lives.
    """
    now = members(prefix)
    for mark, pids in known.items():
        pids.update(now.get(mark, {}))
    living = {
        mark: {pid: ticks for pid, ticks in pids.items() if start_ticks(pid) == ticks}
        for mark, pids in known.items()
    }
    return {mark: pids for mark, pids in living.items() if pids}


def kill(mark: str) -> None:
    """Kill what carries `mark`, without waiting."""
    for pid, ticks in members(mark).get(mark, {}).items():
        _signal(pid, ticks, signal.SIGKILL)


def _signal(pid: int, ticks: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        descriptor = os.pidfd_open(pid)
        try:
            if start_ticks(pid) == ticks:
                signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _mark_of(pid: int) -> str:
    """The mark of `pid`; "" without one, or where the process is another user's."""
    name = f"{MARK}=".encode()
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    return next((i[len(name) :].decode() for i in items if i.startswith(name)), "")


def _marked_ancestor(pid: int, marks: Mapping[int, str], parents: Mapping[int, int]) -> int | None:
    """The nearest of `pid` and its ancestors that is marked."""
    seen: set[int] = set()
    while pid in parents and pid not in seen:
        if pid in marks:
            return pid
        seen.add(pid)
        pid = parents[pid]
    return None
