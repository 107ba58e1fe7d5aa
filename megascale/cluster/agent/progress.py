"""Progress pages: made for each rank and epoch, read when a heartbeat is written.

    /dev/shm/megascale-KEY-AGENT/rank00003-e7    KEY of run and node

In the node's folder of the run where there is no /dev/shm.

A page an epoch: what an old rank still writes goes to its own. A page that was never written, or is
of another epoch, is no progress.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from megascale.cluster.agent.rank_process import RankStatus
from megascale.cluster.messages import Progress
from megascale.events import PAGE_BYTES, ProgressReader


def page_path(folder: Path, rank: int, epoch: int) -> Path:
    return folder / f"rank{rank:05d}-e{epoch}"


def rank_of_page(path: str) -> tuple[int, int] | None:
    """(rank, epoch) of a page's path."""
    found = re.search(r"/rank(\d+)-e(\d+)$", path)
    return (int(found[1]), int(found[2])) if found else None


def make_page(path: Path) -> None:
    """An empty page. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(bytes(PAGE_BYTES))


class Pages:
    """Open pages of the running ranks; for one thread."""

    def __init__(self) -> None:
        self._open: dict[str, ProgressReader] = {}

    def read(self, status: RankStatus) -> Progress | None:
        """What the rank last said; None before its first word."""
        if not status.page:
            return None
        if status.page not in self._open:
            try:
                self._open[status.page] = ProgressReader(Path(status.page))
            except (OSError, ValueError):
                return None
        reader = self._open[status.page]
        try:
            issued, completed = reader.issued(), reader.completed()
        except IndexError:  # a phase of a newer trainer
            return None
        if issued is None or issued.epoch != status.epoch:
            return None
        return Progress(
            epoch=issued.epoch,
            step=issued.step,
            phase=issued.phase,
            age_s=max(0, time.monotonic_ns() - issued.monotonic_ns) / 1e9,
            chunk=issued.chunk,
            micro_batch=issued.micro_batch,
            group_id=issued.group_id,
            seq=issued.seq,
            saved=issued.saved,
            completed_step=completed.step if completed else None,
            completed_phase=completed.phase if completed else None,
        )

    def keep(self, statuses: tuple[RankStatus, ...]) -> None:
        """Close the pages of ranks that are not among `statuses`."""
        wanted = {status.page for status in statuses}
        for path in set(self._open) - wanted:
            self._open.pop(path).close()
