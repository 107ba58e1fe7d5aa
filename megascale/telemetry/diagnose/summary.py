"""The heat map of a job: time by rank and phase, and what stands out along every dimension
(MegaScale 5.1, Figure 7).

Suffixes: R ranks, P phases.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.topology import Mesh

SHARE = 0.05  # slower than the others by this much, and ...
SIGMAS = 6.0  # ... by as many robust deviations
FEWEST = 3  # values along a dimension that can be compared

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Outlier:
    """Ranks with one `value` of `dimension` take `share` longer in `phase` than the median value.

    dimension  "rank", "host", "tensor", "data" or "pipeline"
    """

    dimension: str
    value: str
    phase: str
    share: float
    num_ranks: int


@dataclass(frozen=True)
class HeatMap:
    """Mean milliseconds a step, (ranks, phases), NaN where a rank has no such phase."""

    ranks: tuple[int, ...]
    phases: tuple[str, ...]
    mean_ms_RP: Floats
    outliers: tuple[Outlier, ...]

    def as_json(self) -> dict[str, Any]:
        """For the dashboard and `--json`; None where there is no value."""
        rows = [
            [None if np.isnan(x) else round(float(x), 4) for x in row] for row in self.mean_ms_RP
        ]
        return {
            "ranks": list(self.ranks),
            "phases": list(self.phases),
            "mean_ms": rows,
            "outliers": [vars(outlier) for outlier in self.outliers],
        }


def heat_map(
    sums: Mapping[int, Iterable[Mapping[str, int]]],
    mesh: Mesh,
    host_of: Mapping[int, str] | None = None,
) -> HeatMap:
    """The heat map of `sums`: by rank, one mapping of phases to ns a step, of the same steps.

    host_of  the host of each rank, where it is known: a dimension of its own
    """
    ranks = tuple(sorted(sums))
    steps = {rank: list(sums[rank]) for rank in ranks}
    phases = tuple(sorted({phase for of in steps.values() for step in of for phase in step}))
    mean_ms_RP = np.full((len(ranks), len(phases)), np.nan)
    for row, rank in enumerate(ranks):
        for column, phase in enumerate(phases):
            values = [step[phase] for step in steps[rank] if phase in step]
            if values:
                mean_ms_RP[row, column] = sum(values) / len(steps[rank]) / 1e6
    outliers = []
    for dimension, places in _dimensions(ranks, mesh, host_of or {}).items():
        outliers += _outliers(dimension, places, phases, mean_ms_RP, _stages(ranks, mesh))
    return HeatMap(ranks, phases, mean_ms_RP, tuple(outliers))


def _dimensions(
    ranks: Sequence[int], mesh: Mesh, host_of: Mapping[int, str]
) -> dict[str, list[str]]:
    at = [mesh.coordinates(rank) for rank in ranks]
    found = {
        "rank": [str(rank) for rank in ranks],
        "tensor": [str(place.tp_rank) for place in at],
        "data": [str(place.dp_rank) for place in at],
        "pipeline": [str(place.pp_rank) for place in at],
    }
    if all(rank in host_of for rank in ranks):
        found["host"] = [host_of[rank] for rank in ranks]
    return found


def _stages(ranks: Sequence[int], mesh: Mesh) -> NDArray[np.int64]:
    return np.array([mesh.coordinates(rank).pp_rank for rank in ranks], dtype=np.int64)


def _outliers(
    dimension: str,
    values: Sequence[str],
    phases: Sequence[str],
    mean_ms_RP: Floats,
    stage_R: NDArray[np.int64],
) -> list[Outlier]:
    """Stages do different work, so a rank is compared within its stage but along "pipeline"."""
    names = sorted(set(values))
    if len(names) < FEWEST:
        return []
    of_value = np.searchsorted(names, values)
    found = []
    for column, phase in enumerate(phases):
        times_R = mean_ms_RP[:, column]
        relative_R = times_R if dimension == "pipeline" else _within(times_R, stage_R)
        known = ~np.isnan(relative_R)
        middle = _medians(relative_R, of_value, len(names))
        for number in np.flatnonzero(_stands_out(middle)):
            share = middle[number] / float(np.nanmedian(middle)) - 1
            count = int(np.sum(known & (of_value == number)))
            found.append(Outlier(dimension, names[number], phase, round(float(share), 4), count))
    return found


def _medians(values_R: Floats, group_R: NDArray[np.int64], num_groups: int) -> Floats:
    """Median of each group's known values, NaN for a group that has none."""
    known = np.flatnonzero(~np.isnan(values_R))
    order = known[np.argsort(group_R[known], kind="stable")]
    cuts = np.searchsorted(group_R[order], np.arange(1, num_groups))
    return np.array(
        [np.median(part) if len(part) else np.nan for part in np.split(values_R[order], cuts)]
    )


def _within(times_R: Floats, stage_R: NDArray[np.int64]) -> Floats:
    relative_R = np.full(len(times_R), np.nan)
    for stage in np.unique(stage_R):
        of_stage = (stage_R == stage) & ~np.isnan(times_R)
        usual = float(np.median(times_R[of_stage])) if of_stage.any() else 0.0
        if usual > 0:
            relative_R[of_stage] = times_R[of_stage] / usual
    return relative_R


def _stands_out(middle: Floats) -> NDArray[np.bool_]:
    known = middle[~np.isnan(middle)]
    if len(known) < FEWEST:
        return np.zeros(len(middle), bool)
    usual = float(np.median(known))
    sigma = 1.4826 * float(np.median(np.abs(known - usual)))
    with np.errstate(invalid="ignore"):
        out: NDArray[np.bool_] = middle - usual > max(SHARE * usual, SIGMAS * sigma)
    return out if usual > 0 else np.zeros(len(middle), bool)
