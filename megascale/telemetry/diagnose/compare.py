"""Runs of one job beside each other: the MFU of each, and the hosts behind the difference
(MegaScale Figure 6 and 6.3: without about 0.5 % of machines, slow in every run, MFU agreed).

A host is compared with the others of its run by the computing time of its ranks through the median
of their stage. One that is slow where the run is slow, and is not in the other run or not slow
there, explains the difference; one that is slow in all of them explains none.

Suffixes: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SLOW = 0.04  # of a host's computing time, above that of the others


@dataclass(frozen=True)
class Behind:
    """The hosts that make one run slower than another: (host, share that it computes longer)."""

    faster: int
    slower: int
    difference: float
    hosts: tuple[tuple[str, float], ...]


def host_ratios(compute_R: Floats, stage_R: Integers, host_R: Sequence[str]) -> dict[str, float]:
    """By host: median of its ranks' computing time through the median of their stage."""
    ratio_R = np.full(len(compute_R), np.nan)
    for stage in np.unique(stage_R):
        of = np.flatnonzero(stage_R == stage)
        usual = float(np.nanmedian(compute_R[of]))
        if usual > 0:
            ratio_R[of] = compute_R[of] / usual
    names, group_R = np.unique(np.asarray(host_R, dtype=object).astype(str), return_inverse=True)
    found = {}
    for number, name in enumerate(names):
        own = ratio_R[(group_R == number) & ~np.isnan(ratio_R)]
        if len(own):
            found[str(name)] = float(np.median(own))
    return found


def hosts_behind(speeds: Sequence[float], ratios: Sequence[Mapping[str, float]]) -> Behind | None:
    """Between the fastest and the slowest run; None for fewer than two runs.

    speeds  MFU of each run, or anything else of which more is faster
    ratios  of each run, `host_ratios`
    """
    if len(speeds) < 2:
        return None
    slower, faster = int(np.argmin(speeds)), int(np.argmax(speeds))
    found = [
        (host, ratio - 1)
        for host, ratio in ratios[slower].items()
        if ratio > 1 + SLOW and ratios[faster].get(host, 1.0) < 1 + SLOW
    ]
    found.sort(key=lambda one: -one[1])
    return Behind(faster, slower, 1 - speeds[slower] / speeds[faster], tuple(found))
