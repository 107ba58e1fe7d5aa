"""Which checkpoints stay on disk: old ones are deleted behind training, between saves.

A thousand files take seconds to delete on storage that nodes share, and every rank would wait for
the one that deletes. The next save waits for it: a folder that is being written has no mark yet,
as the leftovers that are deleted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from megascale.checkpoint import apply_retention
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)


class Rotation:
    """Of the checkpoints in `root`, of which the last `most` stay. For one rank.

    loaded_from  what the run was loaded from, which stays too
    """

    def __init__(self, root: Path, most: int) -> None:
        self._root, self._most = root, most
        self.loaded_from: Path | None = None
        self._has_told = False
        self._thread: threading.Thread | None = None

    def start(self, newest: Path, protect: Iterable[str]) -> None:
        """`newest` was committed just now, and is good. `protect`: names that stay too."""
        self.join()
        stay = [self._root / name for name in protect]
        if self.loaded_from is not None:
            stay.append(self.loaded_from)
        self._thread = threading.Thread(
            target=self._rotate, args=(newest, stay), name="rotation", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _rotate(self, newest: Path, protect: list[Path]) -> None:
        try:
            gone = apply_retention(self._root, self._most, protect=protect, known_good=newest)
        except (CheckpointError, OSError) as error:
            logger.warning("old checkpoints in %s were not deleted: %s", self._root, error)
            return
        if gone and not self._has_told:  # the first deletion is told; those of later saves are not
            self._has_told = True
            names, what = ", ".join(path.name for path in gone), "checkpoint.keep_latest_k"
            logger.info("deleted %s: the last %d checkpoints stay (%s)", names, self._most, what)
