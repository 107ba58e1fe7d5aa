"""The remote tier of a run: where it is, whose it is, what is copied there and what of it stays."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from megascale.checkpoint import apply_retention
from megascale.checkpoint.agree import Ranks
from megascale.config import CheckpointConfig
from megascale.storage import FileWriter, open_storage
from megascale.telemetry.recorder import Recorder
from megascale.train.remote_copies import Copied, CopyFailed, RemoteCopies
from megascale.train.waiting import Waiting

logger = logging.getLogger(__name__)


class RemoteTier:
    """Of this rank. `submit` and `wait` on all ranks in one order.

    root   of the checkpoints on disk
    ranks  all of them, over a group that nobody else uses
    fence  see `RemoteCopies`
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        root: Path,
        ranks: Ranks,
        recorder: Recorder,
        *,
        waiting: Waiting,
        fence: Callable[[], None],
    ) -> None:
        self._settings, self._recorder, self._ranks = settings, recorder, ranks
        self._waiting = waiting
        self._last: Path | None = None
        disk, remote = open_storage(root), open_storage(settings.remote)  # refuse, before it starts
        self._writer = FileWriter()
        self._writer.start()
        self._copies = RemoteCopies(
            disk,
            remote,
            ranks,
            self._writer.copy_file,
            fence=fence,
            settle=self._rotate,
            moved=waiting.moved,
        )

    def submit(self, path: Path) -> None:
        """`path`, which is committed on disk, is to be copied, once."""
        if path == self._last:
            return
        self._last = path
        step = int(path.name.removeprefix("step-").partition(".")[0])
        self._copies.submit(step, path.name)

    def protected(self) -> list[str]:
        """Names on disk that are being copied, or will be."""
        return self._copies.protected()

    def poll(self) -> None:
        """Tell what has ended; never waits."""
        for ended in self._copies.finished():
            if not self._ranks.is_writer:
                continue  # one rank says it for all
            if isinstance(ended, Copied):
                self._recorder.incident(
                    "checkpoint_copied",
                    step=ended.step,
                    path=f"{self._settings.remote}/{ended.target}",
                    seconds=round(ended.seconds, 6),
                )
            elif isinstance(ended, CopyFailed):
                self._recorder.incident(
                    "checkpoint_copy_failed", step=ended.step, reason=ended.reason
                )
                logger.error(
                    "step %d was not copied to %s, training goes on: %s",
                    ended.step,
                    self._settings.remote,
                    ended.reason,
                )

    def wait(self) -> None:
        """Until all that was submitted has ended."""
        if self._copies.is_busy:
            with self._waiting("join"):
                self._copies.join()
        self.poll()

    def close(self) -> None:
        self._copies.close()
        self._writer.close()

    def _rotate(self, newest: str) -> None:
        remote = self._settings.remote
        most = self._settings.remote_keep_latest_k
        apply_retention(remote, most, known_good=f"{remote}/{newest}")
