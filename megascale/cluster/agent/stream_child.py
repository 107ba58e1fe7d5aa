"""Streams what the node's ranks record to the run's queue, in a child that may be killed.

    python -m megascale stream RUN --ranks 0,3 [--no-store]

It is started where the run's configuration names a queue; without one readers take the line files
themselves, and nothing runs here. It follows files and keeps nothing (`telemetry/path`), so its
death costs a second and harms no rank: another one starts, later each time. The node of rank 0
also stores what comes out of the queue; when its ranks are stopped and rank 0 does not come back
here, it leaves that to the node that has it now.

All of it is in a thread of its own: a run folder on a file system that hangs stops this and nothing
else.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megascale.cluster.agent.birth_command import birth

LOOK_S = 1.0
AGAIN_S, MOST_AGAIN_S = 1.0, 60.0  # before it is started again: doubled each time
STAYS_S = 60.0  # one that lived so long starts the count anew
STOPPED_S = 10.0  # after a stop without a start: rank 0 is elsewhere
ENDS_WITHIN_S = 5.0
NICE = 10
PROGRAM = (sys.executable, "-m", "megascale", "stream")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Wanted:
    run_dir: Path
    ranks: frozenset[int]  # that were ever here: their files are followed to the end
    stores: bool


class StreamChild(threading.Thread):
    """`started` and `stopped` say which ranks the node has; from any thread, they never wait."""

    def __init__(self, node: str, program: Sequence[str] = PROGRAM) -> None:
        super().__init__(name="stream", daemon=True)
        self._node, self._program = node, program
        self._wanted: _Wanted | None = None
        self._stopped_s: float | None = None
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._runs: tuple[_Wanted, str] | None = None
        self._began_s, self._again_s, self._wait_s = 0.0, 0.0, AGAIN_S

    def started(self, run_dir: Path, ranks: Collection[int]) -> None:
        with self._lock:
            known = self._wanted
            earlier = known.ranks if known is not None and known.run_dir == run_dir else frozenset()
            self._wanted = _Wanted(run_dir, earlier | frozenset(ranks), 0 in ranks)
            self._stopped_s = None

    def stopped(self) -> None:
        with self._lock:
            self._stopped_s = time.monotonic()

    def end(self, timeout_s: float) -> None:
        """In order: what was written is streamed, what is streamed is stored."""
        self._ended.set()
        self.join(timeout_s)

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                self._look()
            except OSError as error:
                self._put_off(f"cannot be started ({error})")
        self._end_child()

    def _look(self) -> None:
        wanted = self._what_is_wanted()
        if wanted is None:
            return
        queue = queue_of(wanted.run_dir)
        if self._process is not None and self._process.poll() is not None:
            code, self._process = self._process.returncode, None
            if time.monotonic() - self._began_s > STAYS_S:
                self._wait_s = AGAIN_S
            self._put_off(f"ended with {code}")
        if self._process is not None and self._runs != (wanted, queue):
            self._end_child()
        if self._process is None and queue and time.monotonic() >= self._again_s:
            self._start(wanted)
            self._runs = wanted, queue

    def _what_is_wanted(self) -> _Wanted | None:
        with self._lock:
            at_s = self._stopped_s
            is_elsewhere = at_s is not None and time.monotonic() - at_s > STOPPED_S
            if self._wanted is not None and is_elsewhere:
                self._wanted = replace(self._wanted, stores=False)
            return self._wanted

    def _start(self, wanted: _Wanted) -> None:
        """It reads the queue's address from the configuration: there may be a password in it."""
        ranks = ",".join(str(rank) for rank in sorted(wanted.ranks))
        options = ["--ranks", ranks, *([] if wanted.stores else ["--no-store"])]
        log = wanted.run_dir / "logs" / f"stream-{self._node}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*birth(), *self._program, str(wanted.run_dir), *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        with suppress(OSError):  # ranks come first
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)
        self._began_s = time.monotonic()

    def _put_off(self, why: str) -> None:
        _log.warning("the streamer %s; another one in %.0f s", why, self._wait_s)
        self._again_s = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, MOST_AGAIN_S)

    def _end_child(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_WITHIN_S)
        self._process = None


def queue_of(run_dir: Path) -> str:
    """`telemetry.queue` of a run's configuration; empty where there is none, or none yet. OSError:
    the folder cannot be read."""
    try:
        content = json.loads((run_dir / "config.json").read_text())
        return str(content["telemetry"]["queue"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""
