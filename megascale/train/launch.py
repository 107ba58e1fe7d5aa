"""`megascale train --nproc N`: start N ranks on this machine and watch them as one.

Each rank is the same command under torchrun's variables, so a rank started here, by torchrun or by
srun runs the same code. Rank 0 writes to the terminal; every other rank to a log file. When one
rank fails the others are stopped, and the first failure is shown once: ranks that fail because a
peer vanished are not the news.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megascale.env import START, child_environment, free_port
from megascale.errors import LaunchError

GRACE_S = 5.0  # between asking a rank to stop and ending it
LINGER_S = 60.0  # all ranks end together; how long the last may take after the first
POLL_S = 0.05


class StoppedError(LaunchError):
    """Ranks ended because somebody asked them to, not because one failed."""


def launch_local(arguments: Sequence[str], num_ranks: int, logs: Path, port: int | None) -> int:
    """Run `megascale ARGUMENTS` as `num_ranks` ranks; the exit code of the job.

    Raises LaunchError with the first failure. Signals to stop are passed on to every rank.
    """
    port = free_port() if port is None else _check_port(port)
    logs.mkdir(parents=True, exist_ok=True)
    for stale in logs.glob("error-rank*.json"):
        stale.unlink()
    ranks: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def pass_on(signum: int, _frame: FrameType | None) -> None:
        asked.append(signum)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signum)

    start = uuid.uuid4().hex
    old = {s: signal.signal(s, pass_on) for s in stop_signals()}
    try:
        # one by one: a signal on the way finds those that run
        ranks.extend(
            _start(arguments, rank, num_ranks, port, logs, start) for rank in range(num_ranks)
        )
        _wait(ranks, logs, asked)
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
        _stop(ranks)
    return 0


def stop_signals() -> list[signal.Signals]:
    """What asks a run to save and end: also a closed terminal, unless nohup said to ignore it."""
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)
    return signals


@contextmanager
def stopped_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """A signal to stop calls `ask`, and does nothing else."""
    old = {s: signal.signal(s, lambda _signum, _frame: ask()) for s in stop_signals()}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def record_failure(logs: Path, global_rank: int, message: str, exit_code: int) -> None:
    """Called by a failing rank: leaves its error, with the time, for whoever started it."""
    logs.mkdir(parents=True, exist_ok=True)
    entry = {"time_ns": time.time_ns(), "message": message, "exit_code": exit_code}
    (logs / f"error-rank{global_rank:05d}.json").write_text(json.dumps(entry))


def _start(
    arguments: Sequence[str], rank: int, num_ranks: int, port: int, logs: Path, start: str
) -> subprocess.Popen[bytes]:
    environment = child_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            START: start,
        }
    )
    environment.setdefault("OMP_NUM_THREADS", "1")
    log = (logs / f"rank{rank:05d}.log").open("wb")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "megascale", *arguments],
            preexec_fn=_stop_with_parent,  # noqa: PLW1509 - this parent has no threads
            env=environment,
            stdout=None if rank == 0 else log,
            stderr=log,
        )


def _stop_with_parent() -> None:
    """In the new rank: SIGTERM when its parent dies, even by SIGKILL; it saves and ends."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Path, asked: Sequence[int]) -> None:
    """Until all ranks ended well; raises LaunchError with the first failure."""
    first_end: float | None = None
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            seen_ns = time.time_ns()
            time.sleep(0.5)  # peers that fail in the same moment write their reasons too
            _raise_if_stopped(ranks, asked)
            raise _first_failure(ranks, logs, failed, seen_ns)
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not running:
            return
        if len(running) < len(ranks):
            first_end = first_end or time.monotonic()
            if time.monotonic() - first_end > LINGER_S:
                raise LaunchError(
                    f"rank(s) {', '.join(map(str, running))} of {len(ranks)} did not end within "
                    f"{LINGER_S:.0f} s after the others; they were stopped, see {logs}"
                )
        time.sleep(POLL_S)


def _raise_if_stopped(ranks: Sequence[subprocess.Popen[bytes]], asked: Sequence[int]) -> None:
    """Raises StoppedError where a rank had no loop yet to save and return when it was asked to."""
    for signum in asked:
        if any(process.poll() in (-signum, 128 + signum) for process in ranks):
            name = signal.Signals(signum).name
            raise StoppedError(f"stopped by {name} while no step was running")


def _first_failure(
    ranks: Sequence[subprocess.Popen[bytes]], logs: Path, failed: Sequence[int], seen_ns: int
) -> LaunchError:
    """The failure that the others follow from.

    failed  the ranks that were found ended at `seen_ns`, at most a poll after they did
    """
    reasons = {}
    for file in logs.glob("error-rank*.json"):
        rank = int(file.stem.removeprefix("error-rank"))
        with suppress(ValueError):  # cut short by a full disk
            reasons[rank] = json.loads(file.read_text())
    first = min(reasons, key=lambda r: reasons[r]["time_ns"], default=None)
    wordless = [rank for rank in failed if rank not in reasons]
    before_ns = seen_ns - int(2 * POLL_S * 1e9)
    if first is None or (wordless and reasons[first]["time_ns"] > before_ns):
        return _died_wordless(wordless[0], ranks, logs)
    error = LaunchError(f"rank {first} of {len(ranks)}: {reasons[first]['message']}")
    error.exit_code = reasons[first]["exit_code"]
    return error


def _died_wordless(rank: int, ranks: Sequence[subprocess.Popen[bytes]], logs: Path) -> LaunchError:
    code = ranks[rank].returncode
    what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited {code}"
    log = logs / f"rank{rank:05d}.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    end = f"ends:\n{tail}" if tail else "is empty"
    return LaunchError(
        f"rank {rank} of {len(ranks)} {what}; all ranks were stopped. Its log {log} {end}"
    )


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + GRACE_S
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _check_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); choose another "
                "with --master-port, or leave it out"
            ) from None
    return port
