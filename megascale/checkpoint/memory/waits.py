"""Saves that had to wait: for the save before, or for a slot. Never dropped, always counted."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)
_LEAST_S = 0.005  # less is no wait


class Waits:
    """num, total_s, longest_s  of all waits of this rank

    told  gets the 1st, 2nd, 4th, 8th ... of them with the sums so far: a run that waits in every
          step writes a few lines, and the last one says how it was
    """

    def __init__(self, told: Callable[[str, dict[str, object]], None]) -> None:
        self._told = told
        self.num = 0
        self.total_s = 0.0
        self.longest_s = 0.0

    def add(self, step: int, why: str, waited_s: float) -> None:
        """The save of `step` waited, because `why`."""
        if waited_s < _LEAST_S:
            return
        self.num += 1
        self.total_s += waited_s
        self.longest_s = max(self.longest_s, waited_s)
        if self.num & (self.num - 1):
            return
        detail = {
            "step": step,
            "waited_s": round(waited_s, 4),
            "why": why,
            "num_waits": self.num,
            "total_s": round(self.total_s, 4),
        }
        self._told("memory_save_waited", detail)
        logger.info(
            "the save to memory of step %d waited %.3f s: %s; %d save(s) waited %.3f s so far",
            step,
            waited_s,
            why,
            self.num,
            self.total_s,
        )
