"""Which phase of a step grew in the course of a run, since when, and whose launches (MegaScale 6.3,
"MFU decreasing").

Values of many steps are cut into at most BUCKETS medians, so that a few wild steps move nothing.
What the last fifth of them is above the first fifth has grown, if it is more than the scatter from
bucket to bucket explains and more than a hundredth of a step. Where waiting for gradients grew
while nothing that ranks do themselves did, ranks launch at other times: in a group all waits end
together, so who waits least came last. If the same ranks come late, they are named; if it is
others in every step, as after garbage collections, nobody is.

Suffixes: S steps, B buckets, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.diagnose.robust import deviation

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BUCKETS = 40
LEAST_STEPS = 20
OF_STEP = 0.01  # growth that is worth a word
SIGMAS = 6.0
SELDOM = 35  # percent of its steps in which a late rank is not late
OUTER = 5  # the first and the last fifth are compared
_MEDIAN_COST = 1.2533  # standard error of a median against that of a mean


@dataclass(frozen=True)
class Growth:
    """A phase that grew.

    since_step  the first step of the bucket with which it begins
    of_step     the growth as a share of a step at the begin
    """

    phase: str
    before_ms: float
    after_ms: float
    since_step: int
    of_step: float

    @property
    def share(self) -> float:
        return self.after_ms / self.before_ms - 1 if self.before_ms else float("inf")


@dataclass(frozen=True)
class Launches:
    """How far apart the ranks of a group launch, ms, at the begin and the end of a run.

    late_R  by how much later each rank launches behind the first of its group than it did, ms
    ranks   who stands out by that; empty where others are late in every step
    """

    before_ms: float
    after_ms: float
    late_ms_R: Floats
    ranks: tuple[int, ...]


def buckets(step_S: Integers, value_S: Floats) -> tuple[Integers, Floats]:
    """First step and median of every bucket of the known values."""
    known = ~np.isnan(value_S)
    step_S, value_S = step_S[known], value_S[known]
    number = min(BUCKETS, max(1, len(step_S) // 5))
    parts = np.array_split(np.arange(len(step_S)), number)
    parts = [part for part in parts if len(part)]
    return (
        np.array([step_S[part[0]] for part in parts], np.int64),
        np.array([np.median(value_S[part]) for part in parts], np.float64),
    )


def growing(step_S: Integers, ms_S: Mapping[str, Floats], step_ms_S: Floats) -> list[Growth]:
    """Phases that grew, by how much of a step, the largest first. Fewer than LEAST_STEPS: none.

    ms_S       by phase: ms in each step, NaN where it is not known
    step_ms_S  how long each step took
    """
    if len(step_S) < LEAST_STEPS:
        return []
    _, whole_B = buckets(step_S, step_ms_S)
    usual_ms = float(np.median(whole_B[: max(1, len(whole_B) // OUTER)]))
    found = []
    for phase, value_S in ms_S.items():
        if np.sum(~np.isnan(value_S)) < LEAST_STEPS:
            continue
        first_B, value_B = buckets(step_S, value_S)
        growth = _growth(phase, first_B, value_B, usual_ms)
        if growth is not None:
            found.append(growth)
    return sorted(found, key=lambda one: -one.of_step)


def _growth(phase: str, first_B: Integers, value_B: Floats, usual_ms: float) -> Growth | None:
    outer = max(1, len(value_B) // OUTER)
    before, after = float(np.median(value_B[:outer])), float(np.median(value_B[-outer:]))
    scatter = _scatter(value_B)
    noise = _MEDIAN_COST * scatter * np.sqrt(2 / outer)
    grown = after - before
    if grown <= max(OF_STEP * usual_ms, SIGMAS * noise):
        return None
    since = _begin(value_B)
    return Growth(phase, before, after, int(first_B[since]), grown / usual_ms)


def _begin(value_B: Floats) -> int:
    """The bucket with which growth begins: of all bends and jumps the one that fits best, where a
    bend is level and then a slope, and a jump is level twice."""
    places = np.arange(len(value_B))
    errors: dict[int, float] = {}
    for begin in places:
        for shape in (np.maximum(0.0, places - begin + 1.0), (places >= begin) * 1.0):
            fit = np.stack([np.ones(len(places)), shape], axis=1)
            found = fit @ np.linalg.lstsq(fit, value_B, rcond=None)[0]
            error = float(np.sum((found - value_B) ** 2))
            errors[int(begin)] = min(error, errors.get(int(begin), error))
    return min(errors, key=lambda begin: errors[begin])


def _scatter(value_B: Floats) -> float:
    """From one bucket to the next, whatever the trend."""
    return float(deviation(np.diff(value_B), 0)[0]) / float(np.sqrt(2)) if len(value_B) > 1 else 0.0


def launch_offsets(
    before_ms_SR: Floats, after_ms_SR: Floats, group_R: Integers, step_ms: float
) -> Launches:
    """Whether the ranks of a group launch further apart than they did, and who.

    before_ms_SR, after_ms_SR  the wait for a collective that ends for all of a group at once, in
                               some early and some late steps
    group_R                    the group of each rank
    """
    early_SR, late_SR = (behind_first(wait, group_R) for wait in (before_ms_SR, after_ms_SR))
    spreads = [_spread(late, group_R) for late in (early_SR, late_SR)]
    grown_R = np.percentile(late_SR, SELDOM, axis=0) - np.median(early_SR, axis=0)
    usual = float(np.median(grown_R))
    limit = max(OF_STEP * step_ms, SIGMAS * float(deviation(grown_R, 0)[0]))
    guilty = np.flatnonzero(grown_R - usual > limit)
    return Launches(spreads[0], spreads[1], grown_R, tuple(int(rank) for rank in guilty))


def behind_first(wait_ms_SR: Floats, group_R: Integers) -> Floats:
    """How long after the first of its group each rank came, ms: who came first waits longest. 0
    where a rank did not finish a step, or none of its group did, as before a restart."""
    longest_SR = np.zeros_like(wait_ms_SR)
    for group in np.unique(group_R):
        of = np.flatnonzero(group_R == group)
        longest_SR[:, of] = np.fmax.reduce(wait_ms_SR[:, of], axis=1, keepdims=True)
    return np.asarray(np.nan_to_num(longest_SR - wait_ms_SR))


def _spread(late_ms_SR: Floats, group_R: Integers) -> float:
    groups = np.unique(group_R)
    most = [late_ms_SR[:, group_R == group].max(axis=1) for group in groups]
    return float(np.median(np.mean(most, axis=0)))
