"""`FileWriter`: the trainer's end of the process that writes its files (`writer_process.py`).

    writer = FileWriter()
    writer.start()                    # early: the process starts beside other work
    written = writer.write(job)       # from a thread: it waits, without the interpreter's lock

What goes wrong there is raised here as a StorageError: the child's own message, a child that died,
no progress for `stall_s`. A child that died or says nothing is replaced for the next job.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any

from megascale.errors import StorageError
from megascale.storage.interface import FileJob, Written
from megascale.storage.waiting import DEFAULT_STALL_S, Stalled, stall_message

_MODULE = "megascale.storage.writer_process"
_GRACE_S = 10.0  # the child finds a stall first and knows more of it
_END_S = 5.0  # a child without a job ends in milliseconds
_KILL_S = 1.0
_UNTOUCHED = "Nothing was committed, older checkpoints are untouched, training can go on"


class FileWriter:
    """One job at a time; threads that ask at once take turns. Forked children must not use it."""

    def __init__(self, *, stall_s: float = DEFAULT_STALL_S) -> None:
        self._stall_s = stall_s
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._closed = False

    def __enter__(self) -> FileWriter:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        child = self._child
        return child.pid if child is not None else None

    def start(self) -> None:
        """Start the process; it is not waited for."""
        with self._turn:
            self._started()

    def write(self, job: FileJob, moved: Callable[[int], None] = lambda _: None) -> Written:
        """Write a file; returns when it is durable. `moved` hears of bytes, on this thread."""
        _refuse_own_memory(job.url)
        fields = {**asdict(job), "header": base64.b64encode(job.header).decode()}
        return self._do({"kind": "write", "job": fields}, f"writing {job.name} to {job.url}", moved)

    def copy_file(
        self,
        source_url: str,
        target_url: str,
        name: str,
        moved: Callable[[int], None] = lambda _: None,
        *,
        header_bytes: int = 0,
    ) -> Written:
        """A file of one storage to another, through a few blocks of memory. It is held to nothing;
        what it returns are the hashes of what was read, for whoever holds a manifest."""
        _refuse_own_memory(source_url)
        _refuse_own_memory(target_url)
        job = {
            "kind": "copy",
            "source_url": source_url,
            "target_url": target_url,
            "name": name,
            "header_bytes": header_bytes,
        }
        return self._do(job, f"copying {name} from {source_url} to {target_url}", moved)

    def close(self) -> None:
        """End the process; a job under way fails."""
        self._closed = True
        if not self._turn.acquire(blocking=False):
            self._kill()  # whoever waits for the job is told by its end
            return
        try:
            child, self._child = self._child, None
            if child is not None:
                _end(child)
        finally:
            self._turn.release()

    def _do(self, job: dict[str, Any], doing: str, moved: Callable[[int], None]) -> Written:
        with self._turn:
            child = self._started()
            try:
                _send(child, json.dumps(job).encode() + b"\n", doing, self._stall_s + _GRACE_S)
                answer = self._await(child, doing, moved)
            except _Died:
                raise StorageError(self._obituary(child, doing)) from None
            except BaseException:  # a stall, or an error of `moved`: its answer is still to come
                self._child = None
                _bury(child)  # perhaps in vain: one that sleeps in the kernel is left behind
                raise
        if isinstance(answer, str):
            raise StorageError(answer)
        return answer

    def _await(
        self, child: subprocess.Popen[bytes], doing: str, moved: Callable[[int], None]
    ) -> Written | str:
        """What was written, or what went wrong."""
        num_bytes = 0
        while True:
            reply = self._reply(child, doing, num_bytes)
            if "moved" in reply:
                num_bytes += reply["moved"]
                moved(reply["moved"])
            elif "error" in reply:
                return str(reply["error"])
            else:
                fields = reply["written"]
                return Written(**{**fields, "blocks": tuple(fields["blocks"])})

    def _reply(self, child: subprocess.Popen[bytes], doing: str, num_bytes: int) -> dict[str, Any]:
        assert child.stdout is not None
        while b"\n" not in self._unread:
            wait_s = self._stall_s + _GRACE_S
            if not _is_ready(child.stdout.fileno(), select.POLLIN, wait_s):
                raise Stalled(stall_message(doing, wait_s, num_bytes))
            data = os.read(child.stdout.fileno(), 1 << 16)
            if not data:
                raise _Died
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise StorageError(f"the process that writes files was closed. {_UNTOUCHED}")
        if self._child is not None and self._child.poll() is not None:
            _bury(self._child)
            self._child = None
        if self._child is None:
            self._unread = b""
            self._child = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(os.getpid()), str(self._stall_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._child

    def _kill(self) -> None:
        child = self._child
        if child is not None:
            child.kill()

    def _obituary(self, child: subprocess.Popen[bytes], doing: str) -> str:
        """Only after its end of the pipe closed: it ends, or has."""
        self._child = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
        code = _bury(child)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        why = ", as it was closed" if self._closed else ""
        return f"{doing}: the process that writes files ended {how}{why}. {_UNTOUCHED}"


class _Died(Exception):
    """The child's end of the pipe is closed."""


def _send(child: subprocess.Popen[bytes], data: bytes, doing: str, wait_s: float) -> None:
    """A header may be larger than a pipe: a child that does not read must not hold us for ever."""
    assert child.stdin is not None
    descriptor = child.stdin.fileno()
    os.set_blocking(descriptor, False)
    end_s = time.monotonic() + wait_s
    view = memoryview(data)
    while view.nbytes:
        if not _is_ready(descriptor, select.POLLOUT, end_s - time.monotonic()):
            raise Stalled(stall_message(doing, wait_s, 0))
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            continue
        except BrokenPipeError:
            raise _Died from None


def _is_ready(descriptor: int, event: int, wait_s: float) -> bool:
    poll = select.poll()  # unlike select, of any number of open files
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)
    _bury(child)


def _bury(child: subprocess.Popen[bytes]) -> int:
    """Its exit code, once it is gone; SIGKILL's where the kernel does not let it go yet."""
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILL_S)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    return child.returncode if child.returncode is not None else -signal.SIGKILL


def _refuse_own_memory(url: str) -> None:
    if url.startswith("memory://"):
        raise StorageError(f"{url} lives in one process, and another one writes; name a folder")
