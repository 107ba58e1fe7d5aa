"""The agent's end of a template (`train/template.py`): one import, a fork a warm process.

The main thread's alone, and nothing here waits: a request is a datagram, its answer is looked for
later. A child is the agent's own, as if the agent had started it: the template forks twice, and the
agent adopts the orphan.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from megascale.cluster.agent.birth_command import birth
from megascale.cluster.agent.ledger import HELPER, PAGE_VARIABLE, Member
from megascale.cluster.agent.proc import read_stat
from megascale.cluster.agent.warm_process import ROOM, Code, WarmProcess, code_now

PROGRAM = ("-m", "megascale.train.template")
CHECK_PROGRAM = "megascale.cluster.agent.self_check"
# What it imports beside a rank's modules: those of the self-check and of its workers, but not the
# programs themselves, which a child runs as `__main__`.
MODULES = tuple(f"megascale.cluster.selfcheck.{name}" for name in ("run", "host", "memory", "nvml"))
_MESSAGE_BYTES = 1 << 16
_POLL_S = 0.005
_log = logging.getLogger(__name__)


class Forked:
    """A child that somebody else has forked; what of `subprocess.Popen` its users need."""

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # collected already: how it ended is not known any more
                self.returncode = -signal.SIGKILL
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        give_up_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up_s is not None and time.monotonic() >= give_up_s:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            time.sleep(_POLL_S)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@dataclass
class Template:
    """state: "imports", then "forks", or "cannot" where a fork would not be safe, or "failed".

    environment, code  what it has read
    """

    process: subprocess.Popen[bytes]
    start_ticks: int
    environment: Mapping[str, str]
    code: Code
    started_s: float
    channel: socket.socket
    state: Literal["imports", "forks", "cannot", "failed"] = "imports"
    why: str = ""
    _asked: deque[tuple[int, IO[bytes]]] = field(default_factory=deque)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def member(self) -> Member:
        return Member(self.pid, self.start_ticks, self.pid, HELPER, 0)

    @property
    def coming(self) -> list[int]:
        """Local ranks that were asked for and have not come yet."""
        return [local_rank for local_rank, _ in self._asked]

    def ask(self, local_rank: int, log: Path) -> bool:
        """Have a child forked. False where the request cannot be sent."""
        theirs, ours = os.pipe()
        os.set_blocking(ours, False)
        pipe = os.fdopen(ours, "wb", buffering=0)
        message = json.dumps({"local_rank": local_rank, "log": str(log.absolute())}).encode()
        try:
            socket.send_fds(self.channel, [message], [theirs])
        except OSError:
            pipe.close()
            return False
        finally:
            os.close(theirs)
        self._asked.append((local_rank, pipe))
        return True

    def look(self, now_s: float) -> list[WarmProcess]:
        """Take in what it has said: the children that have come."""
        found = []
        while (said := self._next()) is not None:
            if "forks" in said:
                self.state, self.why = ("forks" if said["forks"] else "cannot"), said["why"]
                continue
            local_rank, pipe = self._asked.popleft()
            stat = read_stat(said["pid"]) if "pid" in said else None
            if stat is None:
                pipe.close()
                self.state, self.why = "failed", str(said.get("error", "its child is gone"))
                continue
            forked = Forked(stat.pid, pipe)
            found.append(
                WarmProcess(
                    forked, stat.start_ticks, local_rank, self.environment, self.code, now_s, None
                )
            )
        return found

    def _next(self) -> dict[str, Any] | None:
        with suppress(OSError, ValueError):
            message = self.channel.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            if message:
                said: dict[str, Any] = json.loads(message)
                return said
        return None

    def end(self) -> None:
        self.channel.close()
        for _, pipe in self._asked:
            pipe.close()
        self._asked.clear()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def begin_template(
    environment: Mapping[str, str], pages: Path, log: Path, now_s: float
) -> Template:
    """Start one. Raises OSError.

    pages  the folder whose name in an environment marks what is this agent's
    """
    code = code_now()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, *PROGRAM, str(theirs.fileno()), *MODULES]
    room = f"{pages}/warm-template".ljust(ROOM, "/")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*birth(), *command],
                env={**environment, PAGE_VARIABLE: room},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    ours.setblocking(False)
    stat = read_stat(process.pid)
    assert stat is not None, f"own child {process.pid} is not in /proc"
    return Template(process, stat.start_ticks, environment, code, now_s, ours)
