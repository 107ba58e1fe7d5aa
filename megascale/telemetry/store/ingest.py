"""The store process: takes messages from a queue, commits segments, says what it has.

The order is what makes it safe to kill: rows and positions become durable in one rename, then the
queue hears the positions, then it may forget the messages. Killed between, the messages come again
and are passed over. A commit is made about once a second, so readers are a second behind.

A message that leaves a gap is refused, and once the queue has nothing else in order, streamers are
asked to go back: the queue lost something without knowing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megascale.errors import DataError
from megascale.telemetry.path.queue import Delivery, Queue
from megascale.telemetry.store.writing import Admitted, StoreWriter

FLUSH_S = 1.0
ASK_S = 10.0  # between requests to go back
AGAIN_S = 5.0  # after a disk or queue that refuses
FINISH_S = 10.0
TAKE = 4096  # messages a call
_log = logging.getLogger(__name__)


class Ingest:
    """One queue into one store, whose lock the caller holds. For one thread."""

    def __init__(self, folder: Path, queue: Queue, *, flush_s: float = FLUSH_S) -> None:
        self.num_gaps = self.num_known = 0  # messages refused, and passed over
        self.num_segments = 0
        self._queue, self._flush_s = queue, flush_s
        self._writer = StoreWriter(folder)
        self._taken: list[Delivery] = []
        self._generation: str | None = None
        self._flushed_s = time.monotonic()
        self._asked_s = -ASK_S

    def run(self, ended: threading.Event) -> None:
        """Until `ended`; then what the queue still has is stored."""
        while not ended.is_set():
            self._try(lambda: self.turn(self._flush_s / 4), ended)
        self._try(self.finish, ended)

    def turn(self, wait_s: float) -> int:
        """Take what there is, and commit where it is time; how many messages were taken.
        QueueError; DataError where the disk refuses: nothing is lost, call again."""
        self._greet()
        deliveries = [] if self._writer.is_full else self._queue.take(TAKE, wait_s)
        has_gap = False
        for delivery in deliveries:
            admitted = self._writer.admit(delivery.message)
            self.num_known += admitted is Admitted.KNOWN
            has_gap |= admitted is Admitted.GAP
            self.num_gaps += admitted is Admitted.GAP
        self._taken += deliveries
        if has_gap:
            self._ask_again()
        if self._writer.is_full or time.monotonic() - self._flushed_s >= self._flush_s:
            self.flush()
        return len(deliveries)

    def finish(self) -> None:
        """Store what the queue has now, or what of it can be stored in `FINISH_S`."""
        until_s = time.monotonic() + FINISH_S
        while self.turn(0.0) and time.monotonic() < until_s:
            pass
        self.flush()

    def flush(self) -> None:
        """Commit what was taken, then say so, then let the queue forget it."""
        self._flushed_s = time.monotonic()
        positions = self._writer.commit()
        if positions:
            self.num_segments += 1
            self._queue.commit(positions)
        if self._taken:
            self._queue.done(self._taken)
            self._taken = []

    def _greet(self) -> None:
        """Tell a queue that is new, or lost what it held, how far everything is stored."""
        if self._generation is None and not self._writer.stored():
            self._queue.ask_again()  # another store may have been here, and said what it had
        generation = self._queue.generation()
        if generation != self._generation:
            self.flush()
            self._queue.commit(self._writer.stored())
            self._generation = generation

    def _ask_again(self) -> None:
        if time.monotonic() - self._asked_s < ASK_S:
            return
        self._asked_s = time.monotonic()
        _log.warning("the queue lost messages; streamers go back to what is stored")
        self.flush()
        self._queue.ask_again()
        self._greet()

    def _try(self, act: Callable[[], object], ended: threading.Event) -> None:
        try:
            act()
        except DataError as error:
            _log.warning("%s; trying again in %.0f s", error, AGAIN_S)
            ended.wait(AGAIN_S)
