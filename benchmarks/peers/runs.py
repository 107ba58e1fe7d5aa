"""One run of megascale or of a peer, with a deadline: a run that hangs costs its own time alone.

A peer's program is started in a process group of its own, which is ended as a whole. What it
printed is kept in a file, and its last lines are the message where it failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from benchmarks.peers.cases import Peer, peer_command
from benchmarks.peers.result import OUT_OF_MEMORY, Result, check, find
from megascale.env import child_environment, free_port
from megascale.errors import LaunchError
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run, check_losses, run_case

SHOWN_LINES = 15


class Failed(LaunchError):
    """A run that gave no figures."""


class OutOfMemory(Failed):
    """A run that did not fit; another set of flags may."""


def run_ours(case: Case, limit_s: float) -> Run:
    """megascale's run, its losses checked. Raises Failed where it takes longer."""
    with _alarm(limit_s, "megascale"):
        run = run_case(case)
    check_losses(run, case.config)
    return run


def run_peer(peer: Peer, case: Case, more: Sequence[str], limit_s: float, *, logs: Path) -> Result:
    """A peer's run, its first loss checked. Raises Failed or NumericalError."""
    command = peer_command(peer, case, free_port(), more)
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{case.model}-{peer.baseline}-tp{case.keys['tp']}-mbs{case.keys['mbs']}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=child_environment(peer.variables),
            start_new_session=True,
        )
        try:
            code = process.wait(None if limit_s == float("inf") else limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"{peer.title} did not end in {limit_s:.0f} s{_tail(log)}") from None
        finally:
            _end(process)
    found = find(log.read_text(errors="replace"))
    if isinstance(found, Result) and code == 0:
        check(found)
        return found
    if found == OUT_OF_MEMORY:
        raise OutOfMemory(f"{peer.title} was out of memory")
    raise Failed(f"{peer.title} ended with code {code}{_tail(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the group that the run was started as."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "".join(f"\n    {line}" for line in lines[-SHOWN_LINES:])


@contextmanager
def _alarm(limit_s: float, what: str) -> Iterator[None]:
    """Raises Failed in the block after `limit_s`; the ranks in it are ended on the way out."""
    if limit_s == float("inf"):
        yield
        return

    def ring(_signum: int, _frame: FrameType | None) -> None:
        raise Failed(f"{what} did not end in {limit_s:.0f} s")

    old = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
