"""A worker by a fork of this process, where it has imported torch before it knew for what.

The agent's self-check after a fault is a child of a template (`train/template.py`), and its workers
are forks of it: the interpreter's start and the import of torch, 2 s of a CPU and most of a light
check, were over before the fault. What a worker does, how it is watched and how it is ended are the
same.

Only a process that says so forks (`allow`), and only while it has one thread: a lock that another
thread holds would be held for ever in the child. No CUDA context is here: all that touches a GPU is
done in workers.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from megascale.env import become, child_environment

_allowed = False


def allow() -> None:
    """From now on, workers of this process are forks of it."""
    global _allowed
    _allowed = True


def is_allowed() -> bool:
    return _allowed and len(os.listdir("/proc/self/task")) == 1


class ForkedModule:
    """What of `subprocess.Popen` a worker needs."""

    def __init__(self, pid: int, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            try:
                _, status = os.waitpid(self.pid, 0)
            except ChildProcessError:  # collected already: how it ended is not known any more
                self.returncode = -signal.SIGKILL
            else:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def start(
    argv: Sequence[str], changes: Mapping[str, str]
) -> subprocess.Popen[bytes] | ForkedModule:
    """argv: interpreter, "-m", module, its arguments. It leads a session; its output is piped."""
    if is_allowed() and list(argv[:2]) == [sys.executable, "-m"]:
        return _fork(argv[2], argv[3:], changes)
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(changes),
        start_new_session=True,
    )


def _fork(module: str, arguments: Sequence[str], changes: Mapping[str, str]) -> ForkedModule:
    pipes = [os.pipe(), os.pipe()]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        pid = os.fork()
    except OSError:
        for end in (*pipes[0], *pipes[1]):
            os.close(end)
        raise
    if pid == 0:
        _be(module, arguments, changes, [ours for _, ours in pipes])
    for _, ours in pipes:
        os.close(ours)
    out, err = (os.fdopen(theirs, "rb", buffering=0) for theirs, _ in pipes)
    return ForkedModule(pid, out, err)


def _be(
    module: str, arguments: Sequence[str], changes: Mapping[str, str], outputs: Sequence[int]
) -> None:
    """The child: the module as a program. Never returns."""
    code = 1
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, standard in ((nothing, 0), (outputs[0], 1), (outputs[1], 2)):
            os.dup2(descriptor, standard)
        for name in os.listdir("/proc/self/fd"):  # no bound is known
            if int(name) > 2:
                with suppress(OSError):  # the listing's own
                    os.close(int(name))
        become(child_environment(changes))
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - the process's border: its last words, for its parent
        traceback.print_exc()
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:  # also where nobody reads any more: a child must never go on as its caller
            os._exit(code)  # the interpreter's end would look through all that was imported
