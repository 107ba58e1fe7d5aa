"""Ends what the agent's ranks left when the agent dies, also by SIGKILL.

A process of its own that waits on a pipe. Each line that comes is the agent's newest record
(`ledger.Record`); the end of the pipe means that the agent is gone, and then everything of the last
record is ended, and its pages are taken away. When the agent ended well nothing is left.

It has its own session and ignores the signals that ask programs to end, so that what ends the agent
does not end it first.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

from megascale.cluster.agent.ledger import Record, sweep

SWEEP_DEADLINE_S = 60.0
_PIPE_BYTES = 1 << 20  # a record of 10,000 processes
_log = logging.getLogger(__name__)


class Watchdog:
    """The agent's end of the pipe."""

    def __init__(self) -> None:
        self._process = self._start()
        self._last: bytes | None = None
        self._behind = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, record: Record) -> None:
        """Hand over the newest record. Never waits: one that does not fit comes again later."""
        self._last = record.to_json().encode() + b"\n"
        self._write()

    def tend(self) -> None:
        """Start it again if it ended, and repeat what it did not take."""
        if self._process.poll() is not None:
            _log.warning("the watchdog (pid %d) ended; another one is started", self.pid)
            self._close_pipe()
            self._process = self._start()
            self._behind = True
        if self._behind:
            self._write()

    def close(self) -> None:
        """To be called when nothing is running any more."""
        self._close_pipe()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "megascale.cluster.agent.watchdog"],
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        with suppress(OSError):  # 64 KiB then
            fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return process

    def _write(self) -> None:
        """A line whole or not at all: a longer one than the pipe takes at once is cut and follows.

        The reader takes the last line that is whole, so half a line does no harm but be late.
        """
        assert self._process.stdin is not None
        if self._last is None:
            return
        try:
            written = self._process.stdin.write(b"\n" + self._last)
        except OSError:
            written = None
        self._behind = written != len(self._last) + 1

    def _close_pipe(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


def wait_for_the_end() -> Record | None:
    """The last whole record on standard input, once that ends."""
    record = None
    for line in sys.stdin.buffer:
        with suppress(ValueError, KeyError, TypeError):
            record = Record.from_json(line)
    return record


def main() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    record = wait_for_the_end()
    if record is None:
        return
    left = sweep(record, SWEEP_DEADLINE_S)
    shutil.rmtree(record.pages, ignore_errors=True)
    for stat in left:
        print(
            f"watchdog: pid {stat.pid} (state {stat.state}) of a dead agent did not end in "
            f"{SWEEP_DEADLINE_S:.0f} s; the host needs a restart",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
