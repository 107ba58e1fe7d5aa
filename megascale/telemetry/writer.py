"""A file of event lines per rank, written in the background (MegaScale 5.1).

The loop only appends to a bounded buffer: when the file system is slow or full, events are dropped
and counted, and the loop never waits. The file grows by whole lines; what a crash leaves of a line
is cut off when the file is opened again, and left out by `events.read_events` until then.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from pathlib import Path

from megascale.events import Dropped, Event, to_line

_log = logging.getLogger(__name__)

_EVENTS_A_WRITE = 4096
_CLOSE_TIMEOUT_S = 5.0


def line_file(run_dir: Path, rank: int) -> Path:
    """Where global rank `rank` of the run in `run_dir` writes its events."""
    return run_dir / "telemetry" / f"rank_{rank:05d}.jsonl"


class LineWriter:
    """A sink for a `Recorder`: call it with an event. Close it, or use it as a context."""

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        buffer_events: int = 65536,
        flush_interval_s: float = 0.5,
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.num_dropped = path, 0
        self._rank, self._num_dropped_said = rank, 0
        self._buffer: deque[Event] = deque()
        self._buffer_events, self._flush_interval_s = buffer_events, flush_interval_s
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._num_bytes = _cut_torn_line(self._descriptor)
        self._failing = self._closed = False
        self._write_lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lines of {path.name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __call__(self, event: Event) -> None:
        """Take `event`, or drop and count it. Never waits, from any thread."""
        waiting = len(self._buffer)
        if self._closed or waiting >= self._buffer_events:
            self.num_dropped += 1
            return
        self._buffer.append(event)
        if waiting == self._buffer_events // 2:
            self._wake.set()

    def flush(self) -> None:
        """Write all that was taken before the call; this waits for the file system."""
        with self._write_lock:
            while self._buffer:
                count = min(len(self._buffer), _EVENTS_A_WRITE)
                self._append([self._buffer.popleft() for _ in range(count)])
            if self.num_dropped > self._num_dropped_said and not self._failing:
                dropped, self._num_dropped_said = self.num_dropped, self.num_dropped
                self._append([Dropped(rank=self._rank, where="writer", count=dropped)])

    def close(self) -> None:
        """Write the rest and close the file; what arrives later is dropped and counted."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning(
                "%s did not take its last lines in %.0f s; %d events are lost",
                self.path,
                _CLOSE_TIMEOUT_S,
                len(self._buffer),
            )
            return
        os.close(self._descriptor)

    def __enter__(self) -> LineWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self._flush_interval_s)
            self._wake.clear()
            self.flush()
        self.flush()

    def _append(self, events: list[Event]) -> None:
        lines = []
        for event in events:
            try:
                lines.append(to_line(event))
            except (TypeError, ValueError) as error:
                self._lost(1, f"{event.kind} event is no JSON: {error}")
        data = "".join(lines).encode()
        try:
            self._write(data)
        except OSError as error:
            self._lost(len(lines), f"{self.path} cannot be written: {error}")
            os.ftruncate(self._descriptor, self._num_bytes)
        else:
            self._num_bytes += len(data)
            self._failing = False

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def _lost(self, count: int, why: str) -> None:
        if not self._failing:
            _log.warning("telemetry loses events, training goes on; %s", why)
        self._failing = True
        self.num_dropped += count


def _cut_torn_line(descriptor: int) -> int:
    """Cut the file after its last newline; the bytes that it has then."""
    end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + newline + 1
        if newline >= 0:
            break
    os.ftruncate(descriptor, end)
    return end
