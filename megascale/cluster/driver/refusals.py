"""What is refused is told once a minute a kind, with how often it came: 1 Hz a node is usual.

Agents of the driver before are told to join: in a driver's first seconds that is no news.
"""

from __future__ import annotations

import logging
import time

EVERY_S = 60.0
FIRST_S = 30.0
_AT_FIRST = (  # kinds, as `desk.py` names them
    "unknown incarnation",
    "result of an unknown incarnation",
    "result of no command of this driver",
    "HTTP 404",
)
_log = logging.getLogger(__name__)


class RefusedError(Exception):
    """To be answered with this status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class Refusals:
    """Counts by kind."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._told: dict[str, tuple[float, int]] = {}
        self._began_s = time.monotonic()

    def note(self, kind: str, detail: str = "") -> None:
        count = self.counts[kind] = self.counts.get(kind, 0) + 1
        at_s, told = self._told.get(kind, (-EVERY_S, 0))
        now_s = time.monotonic()
        if kind in _AT_FIRST and now_s - self._began_s < FIRST_S:
            return
        if now_s - at_s >= EVERY_S:
            self._told[kind] = (now_s, count)
            times = f" ({count - told} times)" if count - told > 1 else ""
            _log.warning("refused: %s%s%s", kind, f": {detail}" if detail else "", times)

    def refuse(self, status: int, detail: str) -> RefusedError:
        """To be raised."""
        self.note(f"HTTP {status}", detail)
        return RefusedError(status, detail)
