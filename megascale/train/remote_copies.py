"""The remote tier: checkpoints that are on disk are copied elsewhere, behind training.

Each rank copies the file that it wrote; when all have, the writer puts the manifest and then the
mark, the same bytes as on disk, so a copy has the number of what it is a copy of. A copy that was
interrupted has no mark and is never loaded.

One copy is under way at a time. Of those that wait the newest alone is made, the writer says which.
Ranks hear of a checkpoint at different times but in one order, so they agree by its place in it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.manifest import MANIFEST, MARK, Manifest
from megascale.errors import CheckpointError
from megascale.storage import Storage

logger = logging.getLogger(__name__)


class Copier(Protocol):
    """What moves a file: `FileWriter.copy_file`."""

    def __call__(
        self, source_url: str, target_url: str, name: str, moved: Callable[[int], None]
    ) -> object: ...


@dataclass(frozen=True)
class Copied:
    """A checkpoint that the remote has. `target`: its name there."""

    step: int
    target: str
    seconds: float


@dataclass(frozen=True)
class CopyFailed:
    step: int
    reason: str


@dataclass(frozen=True)
class CopyLeftOut:
    """A newer one came before its turn."""

    step: int


@dataclass(frozen=True)
class _Task:
    step: int
    name: str


class RemoteCopies:
    """Of this rank. `submit` on all ranks in one order; nothing else is collective.

    disk, remote  where checkpoints are, and where they go
    ranks    all of them, over a group that nobody else uses
    copy     moves a file
    fence    raises where this rank may commit no more; asked on the writer, right before the mark
    settle   the writer's, behind each copy: what the remote holds too much goes
    moved    called as bytes move, from the thread
    """

    def __init__(
        self,
        disk: Storage,
        remote: Storage,
        ranks: Ranks,
        copy: Copier,
        *,
        fence: Callable[[], None] = lambda: None,
        settle: Callable[[str], None] = lambda _: None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._disk, self._remote, self._ranks, self._copy = disk, remote, ranks, copy
        self._fence, self._settle, self._moved = fence, settle, moved
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()  # the first is under way
        self._ended: list[Copied | CopyFailed | CopyLeftOut] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, step: int, name: str) -> None:
        """Checkpoint `name` of the disk is committed: copy it, unless a newer one comes first."""
        with self._changed:
            self._tasks.append(_Task(step, name))
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="remote-copies", daemon=True)
            self._thread.start()

    def finished(self) -> list[Copied | CopyFailed | CopyLeftOut]:
        """What ended since the last call; never waits."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def protected(self) -> list[str]:
        """Names that must stay on disk: what is copied, and the newest that waits."""
        with self._changed:
            return [task.name for task in {*list(self._tasks)[:1], *list(self._tasks)[-1:]}]

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return bool(self._tasks)

    def join(self) -> None:
        """Wait until all that was submitted has ended. Raises what the thread died of."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._tasks)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """No more is begun; what is under way is left to itself, unmarked."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------ behind training

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._tasks)
                    if self._closed:
                        return
                    task = self._tasks[0]
                outcome = self._one(task)
                with self._changed:
                    self._tasks.popleft()
                    self._ended.append(outcome)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised by `join`; a peer is gone, mostly
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _one(self, task: _Task) -> Copied | CopyFailed | CopyLeftOut:
        since_s = time.monotonic()
        try:
            if not self._ranks.writer_does(lambda: self._is_newest(task)):
                return CopyLeftOut(task.step)
            target = self._copy_all(task)
        except CheckpointError as error:  # on all ranks alike
            return CopyFailed(task.step, str(error))
        return Copied(task.step, target, time.monotonic() - since_s)

    def _is_newest(self, task: _Task) -> bool:
        with self._changed:
            return self._tasks[-1] is task

    def _copy_all(self, task: _Task) -> str:
        """Collective; raises CheckpointError on all ranks, then nothing there is marked."""
        target, data = self._ranks.writer_does(lambda: self._begin(task))
        manifest = Manifest.decode(data)
        try:
            names = sorted(manifest.files)[self._ranks.rank :: self._ranks.num_ranks]
            self._ranks.gather(lambda: self._copy_files(task.name, target, names))
            self._ranks.writer_does(lambda: self._commit(task.name, target, manifest, data))
        except CheckpointError:
            if self._ranks.is_writer:
                self._discard(target)
            raise
        self._ranks.writer_does(lambda: self._settle(target))
        return target

    def _begin(self, task: _Task) -> tuple[str, bytes]:
        """A name that nothing at the remote has, as near to the disk's as may be; the manifest."""
        data = self._disk.get(f"{task.name}/{MANIFEST}")
        step, _, attempt = task.name.partition(".")
        number = int(attempt or 0)
        while not self._remote.claim(target := f"{step}.{number}" if number else step):
            number += 1
        return target, data

    def _copy_files(self, name: str, target: str, files: list[str]) -> None:
        for file in files:
            self._copy(
                f"{self._disk.url}/{name}",
                f"{self._remote.url}/{target}",
                file,
                lambda _: self._moved(),
            )

    def _commit(self, name: str, target: str, manifest: Manifest, data: bytes) -> None:
        for file, saved in manifest.files.items():
            found = self._remote.size(f"{target}/{file}")
            if found != saved.num_bytes:
                raise CheckpointError(
                    f"{self._remote.url}/{target}/{file} has {found} bytes, the checkpoint "
                    f"{saved.num_bytes:,}; is checkpoint.remote the same place from every node?"
                )
        self._remote.put(f"{target}/{MANIFEST}", data)
        mark = self._disk.get(f"{name}/{MARK}")
        self._fence()
        self._remote.put(f"{target}/{MARK}", mark)

    def _discard(self, target: str) -> None:
        try:
            self._remote.remove(target)
        except CheckpointError as error:
            logger.warning("%s/%s is left behind, unmarked: %s", self._remote.url, target, error)
