"""The store as a process' work: its lock, its queue, and what goes on beside.

One store a run: who does not get the lock waits until whoever has it is gone, so a second one is a
spare. Merging and forgetting run in a thread of their own; they only ever add a segment that hides
others, or take away what is hidden or too old, so they need no word with who commits.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from megascale.errors import DataError
from megascale.telemetry.path.queue import Queue
from megascale.telemetry.store.ingest import Ingest
from megascale.telemetry.store.merging import merge_what_is_due
from megascale.telemetry.store.retention import retain
from megascale.telemetry.store.writing import StoreLock

LOCK_AGAIN_S = 2.0
MERGE_S = 2.0
MERGE_ENDS_S = 30.0
RETAIN_S = 60.0
_log = logging.getLogger(__name__)


def run_store(
    folder: Path, queue: Queue, ended: threading.Event, *, keep_bytes: float, keep_s: float
) -> int:
    """Store what the queue brings until `ended`, then the rest of it; how many segments that were.
    DataError: the folder cannot be written, or its store is of another version."""
    with StoreLock(folder) as lock:
        if not _acquire(lock, ended):
            return 0
        try:
            ingest = Ingest(folder, queue)
        except OSError as error:
            raise DataError(
                f"{folder} cannot be written ({error}); make room for a store"
            ) from None
        beside = Housekeeping(folder, keep_bytes=keep_bytes, keep_s=keep_s)
        beside.start()
        try:
            ingest.run(ended)
        finally:
            beside.end()
            queue.close()
        return ingest.num_segments


class Housekeeping(threading.Thread):
    """Merges and forgets; for the process that holds the lock."""

    def __init__(self, folder: Path, *, keep_bytes: float, keep_s: float) -> None:
        super().__init__(name="merging", daemon=True)
        self._folder, self._keep_bytes, self._keep_s = folder, keep_bytes, keep_s
        self._ended = threading.Event()
        self._retained_s = -RETAIN_S

    def end(self) -> None:
        """Waits for the merge that is under way, while the lock is held. One that takes longer
        ends with the process, and the next writer takes away what it began."""
        self._ended.set()
        self.join(MERGE_ENDS_S)

    def run(self) -> None:
        while not self._ended.wait(MERGE_S):
            try:
                self.turn()
            except (DataError, OSError) as error:
                _log.warning("the store is not merged: %s", error)

    def turn(self) -> None:
        merge_what_is_due(self._folder)
        if time.monotonic() - self._retained_s >= RETAIN_S:
            self._retained_s = time.monotonic()
            gone = retain(
                self._folder,
                keep_bytes=self._keep_bytes,
                keep_s=self._keep_s,
                now_s=time.time(),
            )
            if gone:
                size = sum(one.num_bytes for one in gone) / 1e9
                _log.info("deleted %.3f GB of the store, see deleted.jsonl", size)


def _acquire(lock: StoreLock, ended: threading.Event) -> bool:
    is_told = False
    while not lock.acquire(for_life=True):
        if not is_told:
            _log.info("somebody else writes this store; waiting")
        is_told = True
        if ended.wait(LOCK_AGAIN_S):
            return False
    return True
