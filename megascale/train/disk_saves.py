"""The disk tier: checkpoints that are written at once or behind training, told, counted, rotated.

Behind training a checkpoint is written from a slot that is held (`Staged`); the loop looks at what
has ended without waiting. One is under way at a time: one that is due meanwhile waits, which is
told with its seconds, and is never left out. A save that failed is told and survived; only who
must have one asks `saved`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megascale.checkpoint import (
    BackgroundSaves,
    Piece,
    SaveFailed,
    Staged,
    digest_pieces,
    save_checkpoint,
)
from megascale.checkpoint.agree import Ranks
from megascale.errors import CheckpointError
from megascale.telemetry.recorder import Recorder
from megascale.train.state import Progress
from megascale.train.tiers import Due
from megascale.train.waiting import Waiting

logger = logging.getLogger(__name__)
_LEAST_TOLD_S = 0.1


@dataclass(frozen=True)
class _UnderWay:
    progress: Progress
    due: Due


class DiskSaves:
    """Of this rank. `save`, `start` and `wait` are collective.

    root       of the checkpoints
    behind     writes from staged states; None: nothing is written behind training
    committed  called on every rank, in the order of commits, with path and what was due
    fence      raises where this rank was given up; asked on the writer when a save has failed
    """

    def __init__(
        self,
        root: Path,
        ranks: Ranks,
        recorder: Recorder,
        waiting: Waiting,
        behind: BackgroundSaves | None,
        committed: Callable[[Path, Due], None],
        fence: Callable[[], None],
    ) -> None:
        self._root, self._ranks, self._recorder = root, ranks, recorder
        self._waiting, self._behind, self._committed = waiting, behind, committed
        self._fence = fence
        self._under_way: deque[_UnderWay] = deque()
        self.saved: Progress | None = None  # what the newest checkpoint holds
        self.path: Path | None = None  # of the newest one that was saved here
        self._above = 0
        self._num_waits = 0
        self.required: Progress | None = None  # what must be saved: where it is not, that is raised

    def number_above(self, number: int) -> None:
        """Saves from here on are newer than the one of that number, wherever it lies."""
        self._above = number
        if self._behind is not None:
            self._behind.above = number

    @property
    def is_busy(self) -> bool:
        return bool(self._under_way)

    def save(
        self, progress: Progress, due: Due, pieces: Sequence[Piece], meta: dict[str, Any]
    ) -> None:
        """At once: training waits."""
        begun = _UnderWay(replace(progress), due)
        try:
            with self._waiting("save"):
                path = save_checkpoint(
                    self._root,
                    progress.step,
                    pieces,
                    meta,
                    group=self._ranks.group,
                    digests=digest_pieces(pieces),
                    above=self._above,
                    moved=self._waiting.moved,
                )
        except CheckpointError as error:
            self._failed(begun, str(error))
        else:
            self._succeeded(begun, Path(path))

    def start(self, staged: Staged, progress: Progress, due: Due, meta: dict[str, Any]) -> None:
        """Behind training; the one before has ended (`wait`)."""
        assert self._behind is not None
        assert not self._under_way, self._under_way
        self._under_way.append(_UnderWay(replace(progress), due))
        self._behind.start(staged, meta)

    def poll(self) -> None:
        """Take note of what has ended; never waits."""
        if self._behind is None:
            return
        for ended in self._behind.finished():
            begun = self._under_way.popleft()
            if isinstance(ended, SaveFailed):
                self._failed(begun, ended.reason)
            else:
                self._succeeded(begun, Path(ended.path))

    def wait(self, op: str) -> None:
        """Until nothing is under way. `op`: "wait" where training would go on otherwise."""
        self.poll()
        if self._behind is None or not self._under_way:
            return
        step, since_s = self._under_way[0].progress.step, time.monotonic()
        with self._waiting(op):
            self._behind.join()
        if op == "wait":
            self._tell_wait(step, time.monotonic() - since_s)
        self.poll()

    def _tell_wait(self, step: int, seconds: float) -> None:
        """Each is an incident; those that cost something are logged, the 1st, 2nd, 4th, 8th ..."""
        self._recorder.incident("checkpoint_waited", step=step, seconds=round(seconds, 6))
        self._num_waits += seconds >= _LEAST_TOLD_S
        number = self._num_waits
        if seconds >= _LEAST_TOLD_S and not number & (number - 1) and self._ranks.is_writer:
            logger.warning(
                "a checkpoint is due, and training waited %.1f s for the one of step %d (the %d. "
                "wait); a larger checkpoint.interval, or a faster storage, costs less",
                seconds,
                step,
                number,
            )

    def _succeeded(self, begun: _UnderWay, path: Path) -> None:
        self.saved, self.path = begun.progress, path
        # its number: also where somebody moves the folder away, and puts it back later
        self.number_above(self._above + 1)
        self._recorder.checkpoint(begun.progress.step, str(path))
        self._committed(path, begun.due)

    def _failed(self, begun: _UnderWay, reason: str) -> None:
        step = begun.progress.step
        self._recorder.incident("checkpoint_failed", step=step, reason=reason)
        if self._ranks.is_writer:
            self._fence()
        if begun.progress == self.required:
            raise CheckpointError(reason)
        logger.error("step %d was not saved, training goes on: %s", step, reason)
