"""The streamer of a node: follows its ranks' line files and publishes what is new.

It only reads files, so it can be killed at any instant and slow down nobody. It keeps no state of
its own: at its start, and whenever the queue says that it may have lost something, it goes back to
what the store has. What it sends twice, the store passes over.

Cost: one thread, a stat a file and second, and memory of one batch (`BATCH_BYTES`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path

from megascale.telemetry.path.line_files import LineFile, list_line_files, telemetry_folder
from megascale.telemetry.path.queue import Message, Queue, QueueError

INTERVAL_S = 1.0
SETTLE_S = 2.0  # after a queue lost something: the store says meanwhile what it has
FINISH_S = 3.0
BATCH_BYTES = 4 << 20
_QUIET_S = 30.0  # between warnings
_log = logging.getLogger(__name__)


class Streamer:
    """Call `turn` again and again, or `run`. For one thread.

    ranks  whose files; None: all of the folder. A node's own files are always followed.
    """

    def __init__(
        self,
        run_dir: Path,
        queue: Queue,
        *,
        ranks: Collection[int] | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self.num_bytes = 0  # published since the start
        self._run_dir, self._queue, self._settle_s = run_dir, queue, settle_s
        self._ranks = None if ranks is None else set(ranks)
        self._files: dict[str, LineFile] = {}
        self._generation: str | None = None
        self._settled_s = 0.0
        self._warned_s = -_QUIET_S

    def follow(self, ranks: Collection[int]) -> None:
        """More ranks have come to this node. Those that left are followed to their files' ends."""
        if self._ranks is not None:
            self._ranks |= set(ranks)

    def run(self, ended: threading.Event, interval_s: float = INTERVAL_S) -> None:
        """Until `ended`, and then on for what was written last, `FINISH_S` at most. An error of the
        queue or of a file is told and tried again."""
        until_s: float | None = None
        while True:
            if ended.is_set() and until_s is None:
                until_s = time.monotonic() + FINISH_S
            try:
                moved = self.turn()
            except QueueError as error:
                moved = 0
                self._warn("%s; what is written stays in the files and is sent later", error)
            if until_s is not None and (not moved or time.monotonic() > until_s):
                return
            if not moved:
                ended.wait(interval_s)

    def turn(self) -> int:
        """Publish what is new, once round all files; the bytes that the queue took. QueueError."""
        if not self._is_ready():
            return 0
        self._look_for_files()
        published, batch, size = 0, list[tuple[LineFile, Message]](), 0
        for file in self._files.values():
            message = self._read(file)
            if message is None:
                continue
            batch.append((file, message))
            size += len(message.lines)
            if size >= BATCH_BYTES:
                taken = self._publish(batch)
                published += taken
                batch, size = [], 0
                if not taken:
                    break
        published += self._publish(batch)
        self.num_bytes += published
        return published

    def _is_ready(self) -> bool:
        """Whether the queue is the one that it was; if not, go back, once the store has spoken."""
        now_s, generation = time.monotonic(), self._queue.generation()
        if generation != self._generation:
            if self._generation is not None:
                self._settled_s = now_s + self._settle_s
            self._generation = generation
            self._files.clear()
        return now_s >= self._settled_s

    def _look_for_files(self) -> None:
        """Files that are new here begin where the store has them to."""
        found = dict[str, LineFile]()
        for name, rank in list_line_files(self._run_dir, self._files).items():
            if not (self._ranks is None or rank in self._ranks or rank < 0):
                continue
            file = LineFile(telemetry_folder(self._run_dir) / name, rank)
            try:
                file.identify()
            except OSError as error:
                self._warn("%s cannot be read (%s); it is tried again", file.path, error)
            if file.source is not None:
                found[file.source] = file
        if found:
            committed = self._queue.committed(found)
            for source, file in found.items():
                file.go_to(committed.get(source, 0))
                self._files[file.path.name] = file

    def _read(self, file: LineFile) -> Message | None:
        try:
            return file.read()
        except OSError as error:
            self._warn("%s cannot be read (%s); it is tried again", file.path, error)
            return None

    def _publish(self, batch: list[tuple[LineFile, Message]]) -> int:
        """The bytes that the queue took; the files of the rest go back. QueueError: all do."""
        taken = 0
        try:
            taken = self._queue.publish([message for _, message in batch]) if batch else 0
        finally:
            for file, message in batch[taken:]:
                file.go_to(message.offset)
        return sum(message.end - message.offset for _, message in batch[:taken])

    def _warn(self, text: str, *values: object) -> None:
        if time.monotonic() - self._warned_s >= _QUIET_S:
            self._warned_s = time.monotonic()
            _log.warning(text, *values)
