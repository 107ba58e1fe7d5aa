"""Ranks that compute slower than their peers, step after step (MegaScale 5.1, 6.3).

What is compared is the time of the computations alone: forward and backward without the
collectives and waits inside them, in which everybody takes as long as the slowest. Each step is
divided by the median of the ranks of the same pipeline stage, so longer sequences and slower steps
cancel; a window of 30 steps is the median of that, so a garbage collection counts for nothing; a
decision takes several windows in a row.

A rank is slow where the mean of its last 3 (or of its last 10) windows is over 1 by more than FLOOR
and than SIGMAS robust deviations of its peers, and each of the last 3 is over by half the floor.
Ten windows find 3 % in one of 12,288 ranks, three find 10 % in one of 8; what that costs in false
alarms is counted in the tests, by the noise of `cluster/chaos/noise.json`.

Suffixes: S steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.robust import Floats, deviation, median

COMPUTES = ("forward", "backward", "backward_input", "backward_weight", "head")
WAITS = (
    *("tp_all_gather_gemm", "tp_gemm_reduce_scatter", "tp_column_backward", "tp_row_backward"),
    *("tp_weight_gather", "tp_embedding_reduce_scatter", "tp_embedding_backward"),
    *("tp_cross_entropy", "param_gather"),
)
"""Spans inside those of COMPUTES that wait for other ranks; none is inside another."""

WINDOW_STEPS = 30
CONFIRM = 3  # windows in a row
HORIZONS = (CONFIRM, 10)  # windows
FLOOR = 0.02
SIGMAS = 6.0
MANY = 32  # peers from which on their own spread is measure enough

_MEDIAN_COST = 1.2533  # standard error of a median against that of a mean
_DEPENDENT = 2.0  # steps in a row are not independent: a host is slow for some at a time

Stages = NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """Some steps in a row.

    ratio_R    median over the steps of a rank's time through that of its peers
    scatter_R  robust deviation of that from step to step
    step       the last one
    """

    ratio_R: Floats
    scatter_R: Floats
    step: int


def compute_ns(phases: Mapping[str, int]) -> int:
    """Time of a step that a rank spent computing, by its sums per span name (`events.Sums`)."""
    total = sum(phases.get(name, 0) for name in COMPUTES)
    return max(0, total - sum(phases.get(name, 0) for name in WAITS))


def window(times_SR: Floats, stage_R: Stages, step: int) -> Window:
    """The window of the steps of `times_SR` (any unit; NaN or 0 where a rank did not report)."""
    known = np.where(times_SR > 0, times_SR, np.nan)
    ratio_SR = np.full(known.shape, np.nan)
    with np.errstate(invalid="ignore"):
        for stage in np.unique(stage_R):
            of_stage = np.flatnonzero(stage_R == stage)
            if len(of_stage) == 2:
                ratio_SR[:, of_stage] = known[:, of_stage] / known[:, of_stage[::-1]]
            elif len(of_stage) > 2:
                ratio_SR[:, of_stage] = known[:, of_stage] / median(known[:, of_stage], axis=1)
    return Window(median(ratio_SR, axis=0)[0], deviation(ratio_SR, axis=0)[0], step)


def cut(times_SR: Floats, stage_R: Stages, first_step: int = 1) -> list[Window]:
    """All whole windows of a run's steps, the first of which is `first_step`."""
    return [
        window(
            times_SR[start : start + WINDOW_STEPS], stage_R, first_step + start + WINDOW_STEPS - 1
        )
        for start in range(0, len(times_SR) - WINDOW_STEPS + 1, WINDOW_STEPS)
    ]


def stragglers(
    windows: Sequence[Window], stage_R: Stages, *, window_steps: int = WINDOW_STEPS
) -> Finding | None:
    """The slow ranks by the newest of `windows` (in order, the last is now); None if there are
    none, or fewer than CONFIRM windows. A stage of one rank has no peers and is never judged.

    stage_R  pipeline stage of each rank
    """
    if len(windows) < CONFIRM:
        return None
    recent = np.stack([one.ratio_R for one in windows[-CONFIRM:]])
    with np.errstate(invalid="ignore"):
        steadily = (recent > 1 + FLOOR / 2).all(axis=0)
    share_R, limit_R = np.zeros(len(stage_R)), np.full(len(stage_R), np.nan)
    over_R = np.zeros(len(stage_R), dtype=int)
    for horizon in HORIZONS:
        if len(windows) < horizon:
            continue
        last = windows[-horizon:]
        excess_R = np.mean([one.ratio_R for one in last], axis=0) - 1
        scatter_R = np.mean([one.scatter_R for one in last], axis=0)
        limits = _limits(excess_R, scatter_R, stage_R, horizon * window_steps)
        with np.errstate(invalid="ignore"):
            slow = steadily & (excess_R > limits) & (over_R == 0)
        share_R, limit_R = np.where(slow, excess_R, share_R), np.where(slow, limits, limit_R)
        over_R[slow] = horizon
    guilty = [int(rank) for rank in np.flatnonzero(over_R)]
    if not guilty:
        return None
    stages = {rank: int(np.sum(stage_R == stage_R[rank])) for rank in guilty}
    return Finding(
        kind="straggler",
        ranks=tuple(guilty),
        evidence={
            "share": {str(r): round(float(share_R[r]), 4) for r in guilty},
            "limit": {str(r): round(float(limit_R[r]), 4) for r in guilty},
            "windows": {str(r): int(over_R[r]) for r in guilty},
            "peers": {str(r): stages[r] - 1 for r in guilty},
            "window_steps": window_steps,
        },
        step=windows[-1].step,
    )


def _limits(excess_R: Floats, scatter_R: Floats, stage_R: Stages, num_steps: int) -> Floats:
    """Excess over which a rank is slow. A few peers may lie close together by chance, so there the
    scatter from step to step bounds the deviation from below."""
    limit_R = np.full(len(stage_R), np.inf)
    for stage in np.unique(stage_R):
        of_stage = stage_R == stage
        num_ranks = int(of_stage.sum())
        if num_ranks < 2:
            continue
        sigma = float(deviation(excess_R[of_stage], 0)[0])
        if num_ranks < MANY:
            by_steps = float(median(scatter_R[of_stage], 0)[0]) / np.sqrt(num_steps)
            by_steps *= _MEDIAN_COST * _DEPENDENT
            sigma = by_steps if num_ranks == 2 else max(sigma, by_steps)
        limit_R[of_stage] = max(FLOOR, SIGMAS * sigma)
    return limit_R
