"""By how much the last launch of a collective comes later than the usual, and whether it grows
(MegaScale 6.3).

With two ranks a data group the paper saw the offset of their launches swing to and fro, and grow
with the steps: irregular pauses of the hosts, garbage collection among them. No rank stands out
then, because each is late in turn; what the collective loses does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

GROWTH = 1.5  # of the second half of the steps over the first
LEAST_S = 0.001  # of growth
LEAST_STEPS = 10
SIGMAS = 2.5  # of the rank sum of the two halves, which wild values do not move


@dataclass(frozen=True)
class Swing:
    """lost_s_S         by step: the mean over its collectives of what the last launch came later
    first_s, last_s  median in the first and in the second half of the steps
    """

    step_S: Integers
    lost_s_S: Floats
    first_s: float
    last_s: float
    grows: bool


def swing(step_L: Integers, meeting_L: Integers, excess_ns_L: Floats) -> Swing:
    """excess_ns_L  own time of each launch less that of its peers (`late.py`); NaN: it has none."""
    known = ~np.isnan(excess_ns_L)
    step_L, meeting_L, excess_L = step_L[known], meeting_L[known], excess_ns_L[known]
    order = np.argsort(meeting_L, kind="stable")
    _, begin_M = np.unique(meeting_L[order], return_index=True)
    lost_M = np.maximum.reduceat(excess_L[order], begin_M) if len(begin_M) else np.zeros(0)
    step_S, of_M, count_S = np.unique(
        step_L[order][begin_M], return_inverse=True, return_counts=True
    )
    lost_S = np.bincount(of_M, np.maximum(lost_M, 0.0), len(step_S)) / np.maximum(count_S, 1) / 1e9
    half = len(step_S) // 2
    if len(step_S) < LEAST_STEPS:
        whole_s = float(np.median(lost_S)) if len(lost_S) else 0.0
        return Swing(step_S, lost_S, whole_s, whole_s, False)
    first_s, last_s = float(np.median(lost_S[:half])), float(np.median(lost_S[-half:]))
    grows = last_s > max(GROWTH * first_s, first_s + LEAST_S)
    return Swing(step_S, lost_S, first_s, last_s, grows and _rises(lost_S[:half], lost_S[-half:]))


def _rises(before_S: Floats, after_S: Floats) -> bool:
    """Are values of `after_S` larger than those of `before_S`, by the sum of their ranks?"""
    larger = float((after_S[:, None] > before_S).sum())
    num_before, num_after = len(before_S), len(after_S)
    sigma = (num_before * num_after * (num_before + num_after + 1) / 12) ** 0.5
    return larger - num_before * num_after / 2 > SIGMAS * sigma
