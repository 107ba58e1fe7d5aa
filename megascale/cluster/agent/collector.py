"""Reads what may be slow, in a thread of its own: logs, files of ranks, interfaces, devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from megascale.cluster.agent.board import Board
from megascale.cluster.agent.rank_process import RankStatus

if TYPE_CHECKING:
    from megascale.cluster.agent.agent import Settings

INTERVAL_S = 0.5
_log = logging.getLogger(__name__)


class Collector(threading.Thread):
    def __init__(
        self,
        settings: Settings,
        board: Board,
        statuses: Callable[[], tuple[RankStatus, ...]],
    ) -> None:
        super().__init__(name="collector", daemon=True)
        self.on_failure: Callable[[], None] = lambda: None
        self._settings, self._board, self._statuses = settings, board, statuses
        self._wake, self._ended = threading.Event(), threading.Event()

    def soon(self) -> None:
        self._wake.set()

    def end(self, timeout_s: float) -> None:
        self._ended.set()
        self._wake.set()
        self.join(timeout_s)

    def run(self) -> None:
        while not self._ended.is_set():
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            for status in self._statuses():
                if status.state != "running":
                    self._board.of(status).is_explained = True
                    self.on_failure()
