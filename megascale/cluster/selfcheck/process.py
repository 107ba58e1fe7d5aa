"""Work in processes that can be ended whatever they do: a sick driver blocks its caller for ever.

A worker is a Python module called with pairs NAME JSON. It does them in that order and writes one
JSON object a line: `{"workload": NAME, "at": TEXT}` before something that may hang,
`{"workload": NAME, "result": {...}}` or `{"workload": NAME, "error": TEXT}` when it is done. So
several short checks share one start of torch, and one that hangs costs only itself: the process is
ended and another does the rest.

A worker is a new interpreter, or a fork of this one (`forked.py`). Each leads a process group of
its own, which is ended as a whole, also after a good end: no orphan stays. Workers ask the kernel
to end them with their parent.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megascale.cluster.selfcheck import forked

POLL_S = 0.02
KILL_WAIT_S = 0.5  # a process that SIGKILL does not end within it sits in the kernel
TAIL = 2_000  # characters of stderr that are kept
AFTER_FAILURE_S = 2.0
LINES_BYTES = 1 << 20  # of results that are read; a worker that writes more is broken


@dataclass(frozen=True)
class Job:
    """One workload.

    limit_s    it may take, its process's start included
    reserve_s  that it leaves before the deadline, for what comes after it
    """

    name: str
    arguments: Mapping[str, Any]
    limit_s: float
    reserve_s: float = 0.0

    def limit(self, start: float, deadline: float) -> float:
        """When it has to be done. Where time is short, it has half of what there is."""
        latest = max(deadline - self.reserve_s, start + 0.5 * (deadline - start))
        return min(start + self.limit_s, latest)


@dataclass(frozen=True)
class Outcome:
    """What came of a job: a result, or why there is none.

    kind  "" with a result; "error" told by itself, "died", "hung" past its limit, "late" when no
          time was left to begin it, "absent" where there is nothing to check
    """

    seconds: float
    result: dict[str, Any] | None = None
    kind: str = ""
    reason: str = ""


class Worker:
    """One running process and what it wrote so far.

    at  what it said that it was about to do
    """

    def __init__(self, argv: Sequence[str], changes: Mapping[str, str]) -> None:
        self.at = "its start"
        self.start = time.monotonic()
        self._ended: bool | None = None
        self._process = forked.start(argv, changes)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._selector = selectors.DefaultSelector()
        for pipe in (self._out, self._err):
            os.set_blocking(pipe, False)
            self._selector.register(pipe, selectors.EVENT_READ)
        self._text, self._read_bytes, self._tail = b"", 0, ""
        self.lines: deque[str] = deque()  # whole ones, not yet looked at

    def poll(self, wait_s: float = POLL_S) -> bool:
        """Take in what it wrote, waiting a little; whether it still runs."""
        running = self._runs()  # before the last read, so that nothing is missed
        if running and not self._selector.get_map():
            time.sleep(wait_s)
        elif running:
            self._take(wait_s)
        else:
            while self._take(0.0):
                pass
        return running

    def answer(self, name: str) -> Outcome | None:
        """The outcome of the workload `name`, once it has been told."""
        while self.lines:
            said = _parse(self.lines.popleft(), name)
            self.at = str(said.get("at", self.at))
            seconds = time.monotonic() - self.start
            if isinstance(said.get("result"), dict):
                return Outcome(seconds, said["result"])
            if "error" in said:
                return Outcome(seconds, None, "error", str(said["error"]))
        return None

    def broken(self, running: bool) -> Outcome:
        """End it, because it died or took too long; how that went."""
        gone = self.end()
        seconds = time.monotonic() - self.start
        if not running:
            reason = f"its process {self.how_it_ended()} (at {self.at})"
            return Outcome(seconds, None, "died", reason)
        killed = "its processes were killed" if gone else f"its process {self.how_it_ended()}"
        return Outcome(
            seconds, None, "hung", f"no answer in {seconds:.1f} s at {self.at}; {killed}"
        )

    def end(self) -> bool:
        """End the whole group and collect the process; False where it does not go."""
        if self._ended is not None:
            return self._ended
        self._kill_group()
        deadline = time.monotonic() + KILL_WAIT_S
        while (running := self._runs()) and time.monotonic() < deadline:
            time.sleep(0.005)
        if not running:
            while self._take(0.0):
                pass
            self._kill_group()  # whom its children started meanwhile; the number is still ours
            self._process.wait()
        self._selector.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._ended = not running
        return self._ended

    def how_it_ended(self) -> str:
        """For people, after `end`: the signal or exit code, and the last line of stderr."""
        code = self._process.returncode
        if code is None:
            how = "cannot be ended: it sits in the kernel"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"exited {code}"
        last = self._tail.strip().splitlines()[-1:] or [""]
        return how + (f": {last[0]}" if last[0] else "")

    def _runs(self) -> bool:
        try:  # without collecting it: its number must not be given away before the group is ended
            found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return False  # somebody else collects all children
        return found is None

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _take(self, wait_s: float) -> bool:
        """Read what is there, after at most `wait_s`; whether there was something."""
        if not self._selector.get_map():
            return False
        took = False
        for key, _ in self._selector.select(wait_s):
            data = os.read(key.fd, 1 << 16)
            took = took or bool(data)
            if not data:
                self._selector.unregister(key.fd)
            elif key.fd == self._err:
                self._tail = (self._tail + data.decode(errors="replace"))[-TAIL:]
            elif self._read_bytes < LINES_BYTES:
                self._read_bytes += len(data)
                *lines, self._text = (self._text + data).split(b"\n")
                self.lines += (line.decode(errors="replace") for line in lines)
        return took


def worker_command(module: str, jobs: Sequence[Job]) -> list[str]:
    pairs = [text for job in jobs for text in (job.name, json.dumps(dict(job.arguments)))]
    return [sys.executable, "-m", module, *pairs]


def run_in_turn(
    module: str, jobs: Sequence[Job], deadline: float, changes: Mapping[str, str] | None = None
) -> dict[str, Outcome]:
    """Do the jobs one after another in as few processes as their health allows.

    deadline  of `time.monotonic()`; a job takes at most its limit and never goes past it
    """
    outcomes: dict[str, Outcome] = {}
    left = list(jobs)
    while left:
        if time.monotonic() >= deadline:
            outcomes |= {job.name: Outcome(0.0, None, "late", "no time was left") for job in left}
            break
        done = _run_until_it_fails(module, left, deadline, changes or {})
        outcomes |= done
        left = [job for job in left if job.name not in done]
    return outcomes


def _run_until_it_fails(
    module: str, jobs: Sequence[Job], deadline: float, changes: Mapping[str, str]
) -> dict[str, Outcome]:
    """Outcomes of the first jobs, at least one: all of them, or up to the one that broke it."""
    worker = Worker(worker_command(module, jobs), changes)
    outcomes: dict[str, Outcome] = {}
    try:
        for job in jobs:
            limit = job.limit(worker.start, deadline)
            while (outcome := worker.answer(job.name)) is None:
                running = worker.poll()
                if not worker.lines and (not running or time.monotonic() >= limit):
                    outcomes[job.name] = worker.broken(running)
                    return outcomes
            outcomes[job.name] = outcome
            worker.start, worker.at = time.monotonic(), "its start"
        return outcomes
    finally:
        worker.end()


def run_together(
    commands: Sequence[Sequence[str]],
    name: str,
    limit: float,
    changes: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """One worker a command, all at once, each for the workload `name`; none outlives `limit`.

    Once one fails, the others have `AFTER_FAILURE_S` left: they may wait for it for ever.
    """
    workers: list[Worker] = []
    outcomes: dict[int, Outcome] = {}
    try:
        workers.extend(Worker(command, changes or {}) for command in commands)
        while len(outcomes) < len(workers):
            for number, worker in enumerate(workers):
                if number in outcomes:
                    continue
                running = worker.poll(POLL_S / len(workers))
                outcome = worker.answer(name)
                if outcome is None and (not running or time.monotonic() >= limit):
                    outcome = worker.broken(running)
                if outcome is not None:
                    outcomes[number] = outcome
                    if outcome.result is None:
                        limit = min(limit, time.monotonic() + AFTER_FAILURE_S)
    finally:
        for worker in workers:
            worker.end()
    return [outcomes[number] for number in range(len(commands))]


def _parse(line: str, name: str) -> dict[str, Any]:
    """The object of a line that is about the workload `name`; libraries write lines too."""
    with suppress(ValueError):
        said = json.loads(line)
        if isinstance(said, dict) and said.get("workload") == name:
            return said
    return {}
