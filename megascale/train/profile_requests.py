"""A rank's end of `megascale profile`: finds requests while it trains, and answers each.

A thread looks at the folder of requests once a second: one stat, 3 us, and a listing only when the
folder has changed. The loop's thread compares one attribute with None at each step. Nothing that
is asked for, or fails on the way, ends the run: what is wrong with a request is its answer.

One request at a time: it waits for its first step, runs, is written by the thread, and then the
next may come. Steps count by the host, which is a step or two ahead of a device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megascale.errors import ConfigError, DataError
from megascale.telemetry.hooks import Hook
from megascale.telemetry.requests import (
    BY_NODES,
    Answer,
    Request,
    State,
    answer_file,
    parse_request,
    requests_folder,
    write_answer,
)
from megascale.train.profilers import Make, Profiler

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
_WRITE_TIMEOUT_S = 60.0  # a profile that is being written when the run ends
_CLOSE_TIMEOUT_S = 5.0  # else: only a file system that hangs takes that long


@dataclass
class _Window:
    """A request that was taken.

    stage   waiting for its first step, running, or over: then the thread has its end to tell
    failed  why it came to nothing
    """

    request: Request
    profiler: Profiler
    stage: Literal["waiting", "running", "over"] = "waiting"
    num_left: int = 0
    first_step: int | None = None
    last_step: int | None = None
    failed: str = ""


class ProfileRequests(Hook):
    """Hook of a recorder; `close` it before the recorder."""

    def __init__(
        self, run_dir: Path, rank: int, world_size: int, makers: Mapping[str, Make]
    ) -> None:
        self._run_dir, self._rank, self._world_size = run_dir, rank, world_size
        self._folder, self._makers = requests_folder(run_dir), makers
        self._step = 0
        self._window: _Window | None = None
        self._seen: set[str] = set()
        self._unreadable: dict[str, tuple[int, int]] = {}
        self._changed_ns: int | None = None
        self._is_settled = False
        self._complained = ""
        self._dismiss_old()
        self._wake, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="profile requests", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ on the loop's thread

    def on_step_start(self, step: int) -> None:
        self._step = step
        window = self._window
        if window is not None and window.stage == "waiting" and step >= window.request.first_step:
            self._begin(window, step)

    def on_step_end(self, step: int) -> None:
        window = self._window
        if window is None or window.stage != "running":
            return
        window.num_left -= 1
        window.last_step = step
        if window.num_left == 0:
            self._attempt(window, window.profiler.end)
            self._over(window)

    def _begin(self, window: _Window, step: int) -> None:
        first = window.request.first_step
        if step > first:
            window.failed = (
                f"step {first} had begun when the request was found; this is step {step}"
            )
            self._over(window)
            return
        window.num_left, window.first_step = window.request.num_steps, step
        self._attempt(window, window.profiler.begin)
        if window.failed:
            self._over(window)
        else:
            window.stage = "running"

    def _attempt(self, window: _Window, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a profiler that fails is an answer, not an end
            window.failed = f"{type(error).__name__}: {error}"

    def _over(self, window: _Window) -> None:
        window.stage = "over"
        self._wake.set()

    # ------------------------------------------------------------ on the thread of requests

    def close(self) -> None:
        """The run ends: what was not finished is answered so."""
        self._closed = True
        self._wake.set()
        timeout_s = _CLOSE_TIMEOUT_S if self._window is None else _WRITE_TIMEOUT_S
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "rank %d: requests were not answered %.0f s after the end, or a profile is lost",
                self._rank,
                timeout_s,
            )

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(LOOK_INTERVAL_S)
            self._wake.clear()
            self._look()
        window = self._window
        if window is not None and window.stage != "over":
            window.failed, window.stage = f"the run ended at step {self._step}", "over"
        self._look()

    def _look(self) -> None:
        try:
            self._finish()
            for path in [] if self._closed else self._new_files():
                self._read(path)
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        """Once, not once a second."""
        if self._complained != str(error):
            self._complained = str(error)
            logger.warning("requests in %s cannot be served: %s", self._folder, error)

    def _finish(self) -> None:
        """Write and tell what is over, and be ready for the next."""
        window = self._window
        if window is None or window.stage != "over":
            return
        path: Path | None = None
        if not window.failed:
            try:
                path = window.profiler.write()
            except Exception as error:  # noqa: BLE001 - as in `_attempt`
                window.failed = f"it could not be written: {type(error).__name__}: {error}"
        self._window = None
        self._answer(window.request.name, "refused" if window.failed else "done", window, path)

    def _new_files(self) -> list[Path]:
        """Requests that were not looked at, by name. A change that comes in the same tick of the
        file system's clock as the listing is seen by one more listing a second later."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if changed_ns == self._changed_ns and self._is_settled and not self._unreadable:
            return []
        self._is_settled, self._changed_ns = changed_ns == self._changed_ns, changed_ns
        files = sorted(self._folder.glob("[!.]*.json"))
        return [path for path in files if path.stem not in self._seen]

    def _read(self, path: Path) -> None:
        """Take a request, or answer why not. One that cannot be read may be half written: only if
        it has not changed at the next look is it what it is."""
        try:
            status, text = path.stat(), path.read_text(errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            self._settle(path.stem, "refused", f"{path.name} cannot be read: {error.strerror}")
            return
        try:
            request = parse_request(path.stem, text)
        except DataError as error:
            state = status.st_mtime_ns, status.st_size
            if self._unreadable.get(path.stem) != state:
                self._unreadable[path.stem] = state
                return
            self._settle(path.stem, "refused", str(error))
            return
        if request.what in BY_NODES:
            self._seen.add(path.stem)
            self._unreadable.pop(path.stem, None)
            return
        why = self._objection(request)
        if why is not None:
            self._settle(path.stem, "refused", why)
        elif request.is_for(self._rank):
            self._take(request)
        else:
            self._settle(path.stem)

    def _objection(self, request: Request) -> str | None:
        """Why this rank does not do it. Of ranks that do not exist rank 0 says so."""
        strangers = [r for r in request.ranks or () if not 0 <= r < self._world_size]
        if strangers and self._rank == 0:
            return f"ranks {strangers} are not of this run, which has {self._world_size}"
        if not request.is_for(self._rank):
            return None
        if self._window is not None:
            return f"busy with request {self._window.request.name}; one at a time"
        if request.first_step <= self._step:
            return f"step {request.first_step} has begun; this is step {self._step}"
        return None

    def _take(self, request: Request) -> None:
        try:
            profiler = self._makers[request.what](request.name, request.num_steps)
        except ConfigError as error:
            self._settle(request.name, "refused", str(error))
            return
        self._settle(request.name, "accepted")
        self._window = _Window(request, profiler)

    def _dismiss_old(self) -> None:
        """What was asked of an earlier start of this rank."""
        try:
            for path in sorted(self._folder.glob("[!.]*.json")):
                self._seen.add(path.stem)
                if not answer_file(self._run_dir, path.stem, self._rank).exists():
                    self._say_if_meant(path)
        except OSError as error:
            self._complain(error)

    def _say_if_meant(self, path: Path) -> None:
        try:
            request = parse_request(path.stem, path.read_text(errors="replace"))
        except (DataError, OSError):
            return
        if request.what not in BY_NODES and request.is_for(self._rank):
            why = "this rank started after the request was made; ask again"
            self._settle(path.stem, "refused", why)

    def _settle(self, name: str, state: State | None = None, why: str = "") -> None:
        """`name` has been looked at; its answer, if this rank has one."""
        self._seen.add(name)
        self._unreadable.pop(name, None)
        if state is not None:
            write_answer(self._run_dir, name, Answer(self._rank, state, why))

    def _answer(self, name: str, state: State, window: _Window, path: Path | None) -> None:
        answer = Answer(
            self._rank,
            state,
            window.failed,
            None if path is None else str(path.relative_to(self._run_dir)),
            window.first_step,
            window.last_step,
        )
        write_answer(self._run_dir, name, answer)
