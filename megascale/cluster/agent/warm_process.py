"""One warm process (`train/warm.py`) from its start until it is a rank, or ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import megascale
from megascale.cluster.agent.birth_command import birth
from megascale.cluster.agent.ledger import HELPER, PAGE_VARIABLE, Member
from megascale.cluster.agent.proc import read_stat
from megascale.env import MEMORY_SLOTS, START

# What names a rank and an epoch: read after imports. All else must be there when it starts.
LATE = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        PAGE_VARIABLE,
        "MEGASCALE_EPOCH",
        MEMORY_SLOTS,
        START,
    )
)
PACKAGE = Path(megascale.__file__).parent
PROGRAM = ("-m", "megascale.train.warm")
ROOM = 2048  # bytes for these in /proc/PID/environ
RANK_PROGRAM = "megascale"
Code = frozenset[tuple[str, int, int]]


class Child(Protocol):
    """What is needed of a `subprocess.Popen`, also of a process that somebody else has forked."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


@dataclass
class WarmProcess:
    """`ready` is None once it is; `environment` and `code` are what it has read."""

    process: Child
    start_ticks: int
    local_rank: int
    environment: Mapping[str, str]
    code: Code
    started_s: float
    ready: IO[bytes] | None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def member(self) -> Member:
        return Member(self.pid, self.start_ticks, self.pid, HELPER, 0)

    def look(self) -> bool:
        """Whether it has become ready since the last look."""
        if self.ready is None or self.ready.read(1) != b"r":
            return False
        self.ready.close()
        self.ready = None
        return True

    def tell(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        module: str = RANK_PROGRAM,
    ) -> bool:
        """Hand over what it is to be; False where it does not take it. Never waits."""
        late = {name: environment[name] for name in sorted(LATE & environment.keys())}
        order: dict[str, object] = {
            "arguments": list(arguments),
            "environment": late,
            "log": str(log.absolute()),
        }
        if module != RANK_PROGRAM:
            order["module"] = module
        line = json.dumps(order).encode() + b"\n"
        assert self.process.stdin is not None
        try:
            taken = self.process.stdin.write(line) == len(line)
        except OSError:
            taken = False
        self.close()
        return taken

    def close(self) -> None:
        for pipe in (self.process.stdin, self.ready):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def end(self) -> None:
        self.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def begin(
    local_rank: int, environment: Mapping[str, str], pages: Path, log: Path, now_s: float
) -> WarmProcess:
    """Start one. Raises OSError.

    pages  the folder whose name in an environment marks what is this agent's
    """
    code = code_now()
    theirs, ours = os.pipe()
    ready = os.fdopen(theirs, "rb", buffering=0)
    os.set_blocking(theirs, False)
    command = [sys.executable, *PROGRAM, str(ours), str(local_rank)]
    room = f"{pages}/warm-{local_rank}".ljust(ROOM, "/")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*birth(), *command],
                env={**environment, PAGE_VARIABLE: room},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                bufsize=0,
                pass_fds=(ours,),
                start_new_session=True,
            )
    except OSError:
        ready.close()
        raise
    finally:
        os.close(ours)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    stat = read_stat(process.pid)
    assert stat is not None, f"own child {process.pid} is not in /proc"
    return WarmProcess(process, stat.start_ticks, local_rank, environment, code, now_s, ready)


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """What must be there when it starts."""
    return {name: value for name, value in environment.items() if name not in LATE}


def code_now() -> Code:
    """The package's modules as they are on disk: path, time of change, bytes. 6 ms for 464."""
    found = []
    folders = [str(PACKAGE)]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    with suppress(OSError):
                        stat = entry.stat()
                        found.append((entry.path, stat.st_mtime_ns, stat.st_size))
    return frozenset(found)


def held_bytes(pid: int) -> int:
    """Memory of the process, its share of what it shares with others; 0 where it is gone."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
