"""`megascale ARGUMENTS` as a process of its own that is forked, with torch imported already.

A fresh interpreter works 1.4 s to import torch and a rank 2.5 s, and a command with two ranks is
three of them. A fork of the server of `tests/distributed.py` is there in hundredths. The ranks that
the program starts are forked from it in turn: in place of `subprocess.Popen` its launcher finds
`Rank`. All else is the program's own: its arguments, environment, folder, signals, logs and exit
code. What a fork cannot show is an interpreter's start and its imports; tests of those start fresh.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.distributed import forkserver


class Forked:
    """What `subprocess.Popen` is, for a process of `multiprocessing`."""

    def __init__(self, process: Any, args: Sequence[str]) -> None:
        process.start()
        self._process = process
        self.args = args
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Program(Forked):
    """`megascale ARGUMENTS` in `folder`, its output and error output read through pipes."""

    def __init__(self, arguments: Sequence[str], folder: Path | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output, into_output = os.pipe()
        errors, into_errors = os.pipe()
        self.stdout: IO[str] = os.fdopen(output)
        self.stderr: IO[str] = os.fdopen(errors)
        ends = DupFd(into_output), DupFd(into_errors)
        given = (list(arguments), environment, str(folder or Path.cwd()), ends)
        try:
            process = forkserver.Process(target=_program, args=given)
            super().__init__(process, ["megascale", *arguments])
        finally:
            os.close(into_output)
            os.close(into_errors)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of both outputs, read to their ends. Raises TimeoutExpired."""
        read: dict[IO[str], str] = {}

        def drain(pipe: IO[str]) -> None:
            read[pipe] = "" if pipe.closed else pipe.read()
            pipe.close()

        pipes = (self.stdout, self.stderr)
        readers = [threading.Thread(target=drain, args=(pipe,), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(timeout)
        return read[self.stdout], read[self.stderr]


class Rank(Forked):
    """What the launcher calls for `subprocess.Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        preexec_fn: Callable[[], None],
        env: Mapping[str, str],
        stdout: IO[bytes] | None,
        stderr: IO[bytes] | None,
    ) -> None:
        program = [sys.executable, "-m", "megascale"]
        assert command[:3] == program, f"the launcher starts {command[:3]}, this forks {program}"
        process = mp.get_context("fork").Process(
            target=_rank, args=(command[3:], preexec_fn, dict(env), stdout, stderr)
        )
        super().__init__(process, command)


def _program(
    arguments: list[str], environment: dict[str, str], folder: str, ends: tuple[Any, Any]
) -> None:
    gc.freeze()  # as in `run_ranks`
    from megascale.train import launch

    for end, number in zip(ends, (1, 2), strict=True):
        _move(end.detach(), number)
    os.chdir(folder)
    stands_in = SimpleNamespace(Popen=Rank, TimeoutExpired=subprocess.TimeoutExpired)
    vars(launch)["subprocess"] = stands_in
    _become(arguments, environment)


def _rank(
    arguments: list[str],
    preexec_fn: Callable[[], None],
    environment: dict[str, str],
    stdout: IO[bytes] | None,
    stderr: IO[bytes] | None,
) -> None:
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):  # the launcher's, which an exec would forget
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    preexec_fn()
    for file, number in ((stdout, 1), (stderr, 2)):
        if file is not None:
            os.dup2(file.fileno(), number)
    _become(arguments, environment)


def _move(descriptor: int, number: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)


def _become(arguments: list[str], environment: dict[str, str]) -> None:
    """Run the command line to its end and exit with its code."""
    import torch

    from megascale.cli import main

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = ["megascale", *arguments]
    try:
        main()
    except Exception:  # noqa: BLE001 - the edge of the process, as the interpreter has it
        traceback.print_exc()
        sys.exit(1)
