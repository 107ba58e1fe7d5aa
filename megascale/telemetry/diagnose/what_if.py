"""What a step would take if the slow ranks were like their peers (2505.05713, in its simplest
form).

A step waits for its slowest rank. So what a slow rank costs is how much the slowest of its stage is
slower with it than with the median of its peers in its place. Schedules hide a part of that and
multiply another; this is the estimate that needs no schedule.

Suffixes: S steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Mean seconds of a step as it was, and as it would be; `saved` is the share in between."""

    step_s: float
    without_s: float

    @property
    def saved(self) -> float:
        return 1 - self.without_s / self.step_s if self.step_s else 0.0


def what_if(
    step_s_S: Floats, compute_s_SR: Floats, stage_R: NDArray[np.int64], slow: Sequence[int] | None
) -> Estimate:
    """The steps without the slowness of ranks `slow`; None: of anybody (all like the median).

    step_s_S      how long each step took
    compute_s_SR  how long each rank computed in it
    stage_R       pipeline stage of each rank
    """
    lost_S = np.zeros(len(step_s_S))
    for stage in np.unique(stage_R):
        of_stage = np.flatnonzero(stage_R == stage)
        times_SR = compute_s_SR[:, of_stage]
        replaced = np.ones(len(of_stage), bool) if slow is None else np.isin(of_stage, slow)
        if not replaced.any():
            continue
        peers_SR = times_SR if replaced.all() else times_SR[:, ~replaced]
        usual_S = np.median(peers_SR, axis=1, keepdims=True)
        without_SR = np.where(replaced, np.minimum(times_SR, usual_S), times_SR)
        # stages work at the same time: what the step loses is what its worst stage loses
        lost_S = np.maximum(lost_S, times_SR.max(axis=1) - without_SR.max(axis=1))
    return Estimate(float(np.mean(step_s_S)), float(np.mean(np.maximum(step_s_S - lost_S, 0.0))))
