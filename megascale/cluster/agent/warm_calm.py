"""When may something import torch beside what else this node does?

Once the ranks are past their first step, or after `REFILL_S`; on a node without ranks after
`QUIET_S`; not soon after one that failed.
"""

from __future__ import annotations

import logging

from megascale.cluster.agent.progress import Pages
from megascale.cluster.agent.rank_process import RankStatus

REFILL_S = 30.0
QUIET_S = 3.0  # without ranks, checks or news of the driver: what is ordered next needs the cores
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0  # after one that died
_log = logging.getLogger(__name__)


class Calm:
    """Remembers when something happened last, and the first step that each rank was seen in."""

    def __init__(self) -> None:
        self._progress = Pages()
        self._first_steps: dict[str, int] = {}
        self._quiet_s = 0.0
        self._pause_s, self._paused_until_s = FIRST_PAUSE_S, 0.0

    def pause(self, why: str, now_s: float) -> None:
        """After a failure, longer each time."""
        _log.warning("%s; the next one is tried in %.0f s", why, self._pause_s)
        self._paused_until_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def worked(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def is_paused(self, now_s: float) -> bool:
        return now_s < self._paused_until_s

    def disturbed(self, now_s: float) -> None:
        """There is a rank, a check, or news."""
        self._quiet_s = now_s

    def is_now(self, now_s: float, running: tuple[RankStatus, ...]) -> bool:
        """The ranks are past their first step, or take long to it; without ranks, after a pause."""
        self._progress.keep(running)
        pages = {status.page for status in running}
        self._first_steps = {page: s for page, s in self._first_steps.items() if page in pages}
        if not running:
            return now_s - self._quiet_s >= QUIET_S
        stepped = [self._has_stepped(status) for status in running]
        return all(stepped) or now_s - max(s.started_s for s in running) > REFILL_S

    def _has_stepped(self, status: RankStatus) -> bool:
        progress = self._progress.read(status)
        if progress is None or progress.step == 0:
            return False
        return progress.step > self._first_steps.setdefault(status.page, progress.step)
