"""The heat map of a job: time by rank and phase, and what stands out along every dimension
(MegaScale 5.1, Figure 7).

A rank is compared with those of its pipeline stage, which do the same work; stages with each other.
Beside the phases as they were recorded there is `compute`: forward and backward without the waits
inside. A slow rank stands out there alone; in the phases that wait, those stand out that wait for
it, so they say where time is lost and not who loses it (`WAITING`).

One pause of a rank, as of garbage collection, is not slowness, and over few steps weighs as much: a
single rank stands out by more than such a pause adds to its mean (`single_share`). Those that wait
for it do so as long, all of them, in phases that are short otherwise: waits stand out by what they
take of a step (`wait_share`).

Suffixes: R ranks, P phases, V values of a dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.diagnose.straggler import COMPUTES, WAITS
from megascale.topology import Mesh

SHARE = 0.05  # slower than the others by this much, and ...
SIGMAS = 6.0  # ... by as many robust deviations
PAUSE_STEPS = 3.0  # the longest pause, in steps: 2.8 among 12,288 ranks of the noise model
FEWEST = 3  # values along a dimension that can be compared
LEAST_OF_STEP = 0.005  # a phase that takes less of a step than this is not worth a word
LEAST_WAIT = 0.01  # of a step: what waits take longer than those of others

COMPUTE = "compute"
WAITING = (
    *("pp_wait", "pp_finish", "grad_sync", "param_gather", "world_sums", "send", "recv"),
    *WAITS,
    *COMPUTES,  # the waits are inside them
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Outlier:
    """Ranks with one `value` of `dimension` take `share` longer in `phase` than the median value.

    dimension  "rank", "host", "tensor", "data" or "pipeline"
    waits      in this phase they wait for others
    """

    dimension: str
    value: str
    phase: str
    share: float
    num_ranks: int

    @property
    def waits(self) -> bool:
        return self.phase in WAITING


@dataclass(frozen=True)
class HeatMap:
    """Mean milliseconds a step, (ranks, phases), NaN where a rank has no such phase; `outliers` of
    what ranks do themselves first, of whole hosts before single ranks, by their share."""

    rank_R: Integers
    phases: tuple[str, ...]
    mean_ms_RP: Floats
    outliers: tuple[Outlier, ...]

    def as_json(self) -> dict[str, Any]:
        """For the dashboard and `--json`; None where there is no value."""
        rounded = np.round(self.mean_ms_RP, 4).astype(object)
        rounded[np.isnan(self.mean_ms_RP)] = None
        return {
            "ranks": self.rank_R.tolist(),
            "phases": list(self.phases),
            "mean_ms": rounded.tolist(),
            "outliers": [{**vars(one), "waits": one.waits} for one in self.outliers],
        }


def heat_map(
    rank_R: Integers,
    phases: Sequence[str],
    mean_ms_RP: Floats,
    mesh: Mesh,
    host_R: Sequence[str] | None = None,
    *,
    num_steps: int | None = None,
) -> HeatMap:
    """The heat map of mean ms a step, with the phase `compute` before the others where forwards or
    backwards are among them.

    host_R     the host of each rank, where it is known: a dimension of its own
    num_steps  over which means are; None: so many that a pause is lost among them
    """
    phases, mean_ms_RP = _with_compute(list(phases), mean_ms_RP)
    stage_R = rank_R // (mesh.tensor * mesh.data)
    places = {
        "host": None if host_R is None else np.asarray(host_R, dtype=object),
        "pipeline": stage_R,
        "data": rank_R // mesh.tensor % mesh.data,
        "tensor": rank_R % mesh.tensor,
        "rank": rank_R,
    }
    relative_RP = _within_stages(mean_ms_RP, stage_R)
    step_ms = np.nansum(np.nan_to_num(mean_ms_RP), axis=1)
    usual_ms = float(np.median(step_ms)) if len(step_ms) else 0.0
    most_ms_P = np.nan_to_num(mean_ms_RP).max(axis=0, initial=0.0)
    judged = np.flatnonzero(most_ms_P >= LEAST_OF_STEP * usual_ms)
    names, of_step_P = [phases[p] for p in judged], _medians_of_step(mean_ms_RP, usual_ms)[judged]
    outliers: list[Outlier] = []
    for dimension, value_R in places.items():
        if value_R is None or not len(rank_R):
            continue
        values_RP = mean_ms_RP if dimension == "pipeline" else relative_RP
        found = _outliers(dimension, value_R, names, values_RP[:, judged], num_steps)
        least = wait_share(num_steps)
        weight = dict(zip(names, of_step_P.tolist(), strict=True))
        outliers += [o for o in found if not o.waits or o.share * weight[o.phase] >= least]
    order = list(places)
    outliers.sort(key=lambda o: (o.waits, o.phase != COMPUTE, order.index(o.dimension), -o.share))
    return HeatMap(rank_R, tuple(phases), mean_ms_RP, tuple(outliers))


def _with_compute(phases: list[str], mean_ms_RP: Floats) -> tuple[list[str], Floats]:
    of = [phases.index(name) for name in COMPUTES if name in phases]
    if not of:
        return phases, mean_ms_RP
    waits = [phases.index(name) for name in WAITS if name in phases]
    known = np.nan_to_num(mean_ms_RP)
    compute_R = np.maximum(known[:, of].sum(axis=1) - known[:, waits].sum(axis=1), 0.0)
    compute_R[np.isnan(mean_ms_RP[:, of]).all(axis=1)] = np.nan
    return [COMPUTE, *phases], np.column_stack([compute_R, mean_ms_RP])


def single_share(num_steps: int | None) -> float:
    """By how much a single rank has to be slower over so many steps to stand out."""
    return SHARE if num_steps is None else max(SHARE, PAUSE_STEPS / max(1, num_steps))


def wait_share(num_steps: int | None) -> float:
    """How much of a step waits must take longer to stand out over so many steps."""
    return LEAST_WAIT if num_steps is None else max(LEAST_WAIT, PAUSE_STEPS / max(1, num_steps))


def _medians_of_step(mean_ms_RP: Floats, step_ms: float) -> Floats:
    """[P]: what each phase usually takes of a step; 0 for one that nobody has."""
    found = np.zeros(mean_ms_RP.shape[1])
    known_P = ~np.isnan(mean_ms_RP).all(axis=0)
    found[known_P] = np.nanmedian(mean_ms_RP[:, known_P], axis=0) / max(step_ms, 1e-9)
    return found


def _outliers(
    dimension: str,
    value_R: NDArray[Any],
    phases: Sequence[str],
    values_RP: Floats,
    num_steps: int | None,
) -> list[Outlier]:
    names, group_R = np.unique(value_R, return_inverse=True)
    if len(names) < FEWEST:
        return []
    middle_VP = _medians(values_RP, group_R.reshape(-1), len(names), lower=True)
    found = []
    for column, phase in enumerate(phases):
        middle = middle_VP[:, column]
        known_R = ~np.isnan(values_RP[:, column])
        for number in np.flatnonzero(_stands_out(middle)):
            share = float(middle[number] / np.nanmedian(middle) - 1)
            count = int(np.sum(known_R & (group_R.reshape(-1) == number)))
            if count == 1 and share <= single_share(num_steps):
                continue
            found.append(Outlier(dimension, str(names[number]), phase, round(share, 4), count))
    return found


def _medians(
    values_RP: Floats, group_R: Integers, num_groups: int, *, lower: bool = False
) -> Floats:
    """Median of each group's known values, (V, P); NaN for a group that has none.

    lower  of two in the middle the smaller: a group of which half is slow is not a slow group
    """
    found = np.full((num_groups, values_RP.shape[1]), np.nan)
    for column in range(values_RP.shape[1]):
        values_R = values_RP[:, column]
        order = np.lexsort((values_R, group_R))  # NaN is last in each group
        counts = np.bincount(group_R[~np.isnan(values_R)], minlength=num_groups)
        firsts = np.searchsorted(group_R[order], np.arange(num_groups))
        has = counts > 0
        low = order[firsts[has] + (counts[has] - 1) // 2]
        high = low if lower else order[firsts[has] + counts[has] // 2]
        found[has, column] = (values_R[low] + values_R[high]) / 2
    return found


def _within_stages(mean_ms_RP: Floats, stage_R: Integers) -> Floats:
    """Of every rank, through the median of its stage; NaN where that is 0."""
    stages, group_R = np.unique(stage_R, return_inverse=True)
    usual_RP = _medians(mean_ms_RP, group_R.reshape(-1), len(stages))[group_R.reshape(-1)]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(usual_RP > 0, mean_ms_RP / usual_RP, np.nan)


def _stands_out(middle_V: Floats) -> NDArray[np.bool_]:
    known = middle_V[~np.isnan(middle_V)]
    if len(known) < FEWEST:
        return np.zeros(len(middle_V), bool)
    usual = float(np.median(known))
    sigma = 1.4826 * float(np.median(np.abs(known - usual)))
    with np.errstate(invalid="ignore"):
        out: NDArray[np.bool_] = middle_V - usual > max(SHARE * usual, SIGMAS * sigma)
    return out if usual > 0 else np.zeros(len(middle_V), bool)


def hosts_of(guilty: Sequence[int], host_of: Mapping[int, str]) -> list[str]:
    """Hosts all of whose ranks are guilty, where they have more than one."""
    num: dict[str, int] = {}
    for host in host_of.values():
        num[host] = num.get(host, 0) + 1
    own: dict[str, int] = {}
    for rank in guilty:
        host = host_of.get(rank, "")
        own[host] = own.get(host, 0) + 1
    return sorted(host for host, count in own.items() if count == num.get(host) and count > 1)
