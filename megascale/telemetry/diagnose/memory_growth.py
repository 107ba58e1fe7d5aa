"""Ranks whose peak memory grows with every look, long after the first steps: what leaks, and when
it will be full.

A run's memory rises while its first steps allocate what all later ones use, and stays. So the first
half of what was seen says nothing, and in the second a rank that grows does so steadily: not in one
jump, which a validation or a checkpoint makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEAST_LOOKS = 6
GROWN = 0.05  # of the memory, in the second half
STEADY = 0.75  # of the looks of the second half rise
LARGEST_JUMP = 0.5  # of the growth, by one look


@dataclass(frozen=True)
class Growing:
    """bytes_a_step, mean of the second half; full_at_step: when `limit_bytes` are reached at that
    rate, None without a limit."""

    rank: int
    bytes_a_step: float
    now_bytes: int
    full_at_step: int | None = None


def growing_memory(
    seen: Mapping[int, Sequence[tuple[int, int]]], limit_bytes: Mapping[int, float] | None = None
) -> list[Growing]:
    """Those that grow, the fastest first.

    seen         (step, peak bytes so far) of each rank, in order of steps
    limit_bytes  of the rank's device, where it is known
    """
    found = []
    for rank, looks in seen.items():
        if len(looks) < LEAST_LOOKS:
            continue
        late = np.array(looks[len(looks) // 2 - 1 :], dtype=float)
        steps, rises = late[-1, 0] - late[0, 0], np.diff(late[:, 1])
        grown = float(late[-1, 1] - late[0, 1])
        if (
            steps <= 0
            or grown < GROWN * late[-1, 1]
            or np.mean(rises > 0) < STEADY
            or rises.max() > LARGEST_JUMP * grown
        ):
            continue
        rate, now = grown / steps, int(late[-1, 1])
        limit = (limit_bytes or {}).get(rank)
        full = None if limit is None else int(late[-1, 0] + max(0.0, limit - now) / rate)
        found.append(Growing(rank, rate, now, full))
    return sorted(found, key=lambda one: (-one.bytes_a_step, one.rank))
