"""Stage 2 of a checkpoint (MegaScale 4.4): from host memory to a storage, behind training.

A thread asks a process (`storage.FileWriter`) to write this rank's held slot, so that no byte
passes through this interpreter, then agrees with the other ranks, and the writer commits. Training
waits only where a save is due while the one before is under way: none is ever left out.

The digests of the state are made from the held values meanwhile (5.5 GB/s of float32 on one core,
faster than they are written), where the caller did not make them on the device.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megascale.checkpoint.agree import Ranks, explain
from megascale.checkpoint.digest import Digests, digest_pieces
from megascale.checkpoint.manifest import SavedFile
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.places import Location, Root, locate, storage_of
from megascale.checkpoint.save import State, commit_together
from megascale.checkpoint.staged import Staged
from megascale.checkpoint.tiling import Tiling
from megascale.storage import FileJob, Written

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """Committed. `num_bytes`: of this rank's values; `seconds`: since `start`."""

    step: int
    path: Location
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class SaveFailed:
    """Not committed, on no rank; what was there before is untouched."""

    step: int
    reason: str


class Writer(Protocol):
    """What a `FileWriter` does here."""

    def write(self, job: FileJob, moved: Callable[[int], None] = ...) -> Written:
        """The file is durable when it returns; raises StorageError."""


class BackgroundSaves:
    """Saves of one root, one at a time. `start` is called in one order on all ranks.

    ranks   all that save, over a group (gloo) that nobody else uses
    writer  started; others may use it too
    fence   called on the writer just before it commits; raises where this trainer no longer may
    above   see `manifest.commit`; counts on the writer, and may be set between saves
    moved   called, from other threads, as this rank's bytes move
    """

    def __init__(
        self,
        root: Root,
        ranks: Ranks,
        writer: Writer,
        *,
        fence: Callable[[], None] = lambda: None,
        above: int = 0,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._root, self._storage = root, storage_of(root)
        self._ranks, self._writer = ranks, writer
        self._fence, self._moved = fence, moved
        self.above = above
        self._tiling = Tiling()
        self._ended: deque[Saved | SaveFailed] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(
        self,
        staged: Staged,
        meta: dict[str, Any],
        *,
        digests: Callable[[], Digests] | None = None,
    ) -> None:
        """Write and commit `staged`, which is released in any case. Waits for the save before.

        digests  of what is staged, asked for when it is there (`launch_digests`); None: made here
        """
        assert not self._is_closed, "closed"
        json.dumps(
            meta
        )  # what cannot be written is refused here, where the caller's stack shows it
        self.join()
        self._thread = threading.Thread(
            target=self._run, args=(staged, meta, digests), name="checkpoint", daemon=True
        )
        self._thread.start()

    def finished(self) -> list[Saved | SaveFailed]:
        """What has ended since the last call, in order; never waits."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def join(self) -> None:
        """Until nothing is under way."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def close(self) -> None:
        self.join()
        self._is_closed = True

    def _run(
        self, staged: Staged, meta: dict[str, Any], digests: Callable[[], Digests] | None
    ) -> None:
        since_s = time.monotonic()
        try:
            with contextlib.ExitStack() as held:
                held.callback(staged.release)
                self._ranks.gather(staged.wait)  # before a folder is made: it may be rolled back
                folder = self._save(staged, meta, digests, held)
        except Exception as error:  # the edge of a thread: told to whoever looks
            logger.debug("the save of step %d failed", staged.step, exc_info=True)
            self._ended.append(SaveFailed(staged.step, _reason(error)))
        else:
            path, took_s = locate(self._root, folder), time.monotonic() - since_s
            self._ended.append(Saved(staged.step, path, staged.num_bytes, took_s))

    def _save(
        self,
        staged: Staged,
        meta: dict[str, Any],
        digests: Callable[[], Digests] | None,
        held: contextlib.ExitStack,
    ) -> str:
        """`held` is left as soon as this rank's values are no longer needed."""

        def write(name: str, header: bytes) -> SavedFile:
            job = FileJob(
                self._storage.url, name, header, str(staged.path), staged.start, staged.num_bytes
            )
            written = self._writer.write(job, lambda _: self._moved())
            return SavedFile(written.num_bytes, len(header), written.header_sha256, written.blocks)

        with ThreadPoolExecutor(1) as beside:
            made = beside.submit(digests or (lambda: _digest_staged(staged)))

            def made_and_released() -> Digests:
                own = made.result()
                held.close()
                return own

            state = State(staged.step, meta, staged.entries, made_and_released)
            return commit_together(
                self._storage,
                state,
                self._ranks,
                self._tiling,
                write,
                fence=self._fence,
                above=self.above,
            )


def _reason(error: Exception) -> str:
    if isinstance(error, RuntimeError):  # of a collective: gloo has no class of its own
        what = str(error).partition(". This is typically")[0]
        return (
            "another rank is gone, or does not answer, while the checkpoint is written; nothing "
            f"was committed ({what})"
        )
    return explain(error)


def _digest_staged(staged: Staged) -> Digests:
    if not staged.entries:
        return {}
    descriptor = os.open(staged.path, os.O_RDONLY)
    try:
        kept = mmap.mmap(descriptor, staged.num_bytes, access=mmap.ACCESS_COPY, offset=staged.start)
    finally:
        os.close(descriptor)
    values = torch.frombuffer(kept, dtype=torch.uint8)
    return digest_pieces(
        Piece(
            entry.key,
            entry.global_shape,
            entry.box,
            values[entry.start : entry.stop].view(entry.dtype).view(entry.box.shape),
        )
        for entry in staged.entries
    )
