"""What a run gives as arrays, and how rows of a query become one.

Suffixes: S steps, R ranks, P phases. Rank order is ascending everywhere; a value that is not known
is NaN.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.diagnose.straggler import COMPUTES, WAITS
from megascale.telemetry.store.identity import Places
from megascale.telemetry.store.queries import Store
from megascale.telemetry.store.tables import SUM_NS

MOST_SUMS = 16_000_000  # rows that are read for the means of every step
PIECES = 40
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class StepTimes:
    """`step_S` ascending; seconds."""

    step_S: Integers
    rank_R: Integers
    dur_s_SR: Floats
    begin_unix_s_SR: Floats


@dataclass(frozen=True)
class PhaseMeans:
    """Mean ms a step of every rank and phase over a window; NaN where a rank has no such phase."""

    rank_R: Integers
    phases: tuple[str, ...]
    mean_ms_RP: Floats
    num_steps_R: Integers


@dataclass(frozen=True)
class PhaseTimes:
    """ns of each phase by step and rank."""

    step_S: Integers
    rank_R: Integers
    ns_SR: Mapping[str, Floats]


class Arrays(ABC):
    """The part of a run that gives arrays; `Run` has the store and knows who the ranks are."""

    _store: Store

    @property
    @abstractmethod
    def places(self) -> Places:
        """Who the ranks are."""

    def phases(self) -> tuple[str, ...]:
        """The names of all spans whose sums are there."""
        columns = self._store.columns("sums")
        return tuple(sorted(c.removeprefix(SUM_NS) for c in columns if c.startswith(SUM_NS)))

    def step_times(self, first: int, last: int) -> StepTimes:
        table = self._between("steps", "dur_ns, t0_ns", first, last)
        step_S, rank_R, (dur_SR, begin_SR) = _pivot(table, ("dur_ns", "t0_ns"))
        return StepTimes(step_S, rank_R, dur_SR / 1e9, begin_SR / 1e9)

    def mean_step_s(self, step_S: Integers) -> Floats:
        """[S]: how long each of the steps took, seconds, mean over ranks; NaN: not there."""
        if not len(step_S):
            return np.zeros(0)
        table = self._store.table(
            "SELECT step, avg(dur_ns) / 1e9 AS mean FROM current_steps WHERE step BETWEEN ? AND ? "
            "GROUP BY step ORDER BY step",
            (int(step_S.min()), int(step_S.max())),
        )
        found = dict(zip(*(table.column(n).to_pylist() for n in ("step", "mean")), strict=True))
        return np.array([found.get(step, np.nan) for step in step_S.tolist()])

    def phase_means(self, first: int, last: int) -> PhaseMeans:
        phases = self.phases()
        # exact in doubles: below 2**53 ns, a hundred days
        sums = "".join(f", sum({_column(name)}::DOUBLE)" for name in phases)
        table = self._store.table(
            f"SELECT rank, count(*){sums} FROM current_sums WHERE step BETWEEN ? AND ? "
            "GROUP BY rank ORDER BY rank",
            (first, last),
        )
        columns = [_floats(column) for column in table.columns]
        steps_R = columns[1]
        means = [column / steps_R / 1e6 for column in columns[2:]]
        mean_ms_RP = np.stack(means, axis=1) if means else np.zeros((len(steps_R), 0))
        known = np.flatnonzero(~np.isnan(mean_ms_RP).all(axis=0))
        return PhaseMeans(
            rank_R=columns[0].astype(np.int64),
            phases=tuple(phases[column] for column in known),
            mean_ms_RP=mean_ms_RP[:, known],
            num_steps_R=steps_R.astype(np.int64),
        )

    def step_means(self, first: int, last: int) -> PhaseTimes:
        """Of every phase the mean over ranks in each step, 0 for one that has none of it; `rank_R`
        is [-1], matrices are (S, 1). Of a run with too many rows to read in seconds
        (MOST_SUMS), runs of steps evenly over the window."""
        steps = " OR ".join(
            f"step BETWEEN {since} AND {until}" for since, until in self._pieces(first, last)
        )
        phases = self.phases()
        sums = "".join(f", avg(coalesce({_column(name)}, 0))::DOUBLE" for name in phases)
        table = self._store.table(
            f"SELECT step{sums} FROM current_sums WHERE {steps} GROUP BY step ORDER BY step"
        )
        step_S, *values = (column.to_numpy() for column in table.columns)
        known = {
            name: np.asarray(column, np.float64)[:, None]
            for name, column in zip(phases, values, strict=True)
            if np.asarray(column).any()
        }
        return PhaseTimes(step_S.astype(np.int64), np.array([-1]), known)

    def _pieces(self, first: int, last: int) -> list[tuple[int, int]]:
        """First and last steps of what `step_means` reads."""
        num_ranks = max(1, len(self.places.rank_R))
        most = max(PIECES, MOST_SUMS // num_ranks)
        if last - first + 1 <= most:
            return [(first, last)]
        edges = np.linspace(first, last + 1, PIECES + 1).astype(int).tolist()
        return [(edge, edge + most // PIECES - 1) for edge in edges[:-1]]

    def phase_times(self, first: int, last: int, phases: Sequence[str]) -> PhaseTimes:
        """Phases that nobody has are left out."""
        there = [name for name in phases if name in self.phases()]
        wanted = ", ".join(_column(name) for name in there) or "NULL"
        table = self._between("sums", wanted, first, last)
        names = tuple(SUM_NS + name for name in there)
        step_S, rank_R, values = _pivot(table, names)
        return PhaseTimes(step_S, rank_R, dict(zip(there, values, strict=True)))

    def computed(self, first: int, last: int) -> PhaseTimes:
        """One phase "compute": forward and backward without the waits inside (`straggler.py`)."""
        there = set(self.phases())
        terms = [f"+ coalesce({_column(n)}, 0)" for n in COMPUTES if n in there]
        terms += [f"- coalesce({_column(n)}, 0)" for n in WAITS if n in there]
        wanted = f"greatest(0, 0 {' '.join(terms)}) AS compute"
        table = self._between("sums", wanted, first, last)
        step_S, rank_R, (compute_SR,) = _pivot(table, ("compute",))
        return PhaseTimes(step_S, rank_R, {"compute": compute_SR})

    def _between(self, table: str, wanted: str, first: int, last: int) -> Any:
        return self._store.table(
            f"SELECT step, rank, {wanted} FROM current_{table} WHERE step BETWEEN ? AND ?",
            (first, last),
        )


def _column(phase: str) -> str:
    return '"' + SUM_NS + phase.replace('"', '""') + '"'


def _floats(column: Any) -> Floats:
    """Nulls become NaN."""
    values = column.to_numpy()
    return np.asarray(values, dtype=np.float64)


def _pivot(table: Any, names: Sequence[str]) -> tuple[Integers, Integers, list[Floats]]:
    """Steps, ranks, and a matrix (steps, ranks) of each column of `names`."""
    step = table.column("step").to_numpy()
    rank = table.column("rank").to_numpy()
    step_S, row = np.unique(step, return_inverse=True)
    rank_R, column = np.unique(rank, return_inverse=True)
    found = []
    for name in names:
        matrix = np.full((len(step_S), len(rank_R)), np.nan)
        matrix[row, column] = _floats(table.column(name))
        found.append(matrix)
    return step_S.astype(np.int64), rank_R.astype(np.int64), found
