"""A folder that exists complete or not at all: written beside its place, renamed when it is whole.

An exception removes what was written, and so does being asked to end (SIGTERM, SIGHUP); what a run
leaves that is killed, the next one on that host clears.
No file locks: many cluster file systems have none.
"""

from __future__ import annotations

import glob
import os
import platform
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def published_whole(output: Path) -> Iterator[Path]:
    """A folder beside `output` to write into, renamed to `output` when the block ends well."""
    stem = f".{output.name}.partial-{platform.node()}-"
    output.parent.mkdir(parents=True, exist_ok=True)
    for leftover in output.parent.glob(f"{glob.escape(stem)}*"):
        pid = leftover.name.removeprefix(stem)
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(leftover)
    partial = output.with_name(f"{stem}{os.getpid()}")
    partial.mkdir()
    try:
        with _ended_by_signals():
            yield partial
        os.rename(partial, output)  # onto an empty folder or nothing; refused where there is more
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """What asks this process to end raises SystemExit here, with the exit code of a shell."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return

    def end(signum: int, _frame: object) -> None:
        raise SystemExit(128 + signum)

    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for signum, handler in before.items():
            if handler != signal.SIG_IGN:  # as `nohup` has it
                signal.signal(signum, end)
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and somebody else's
        return True
    return True
