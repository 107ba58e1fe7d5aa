"""A run as its readers see it: arrays and events out of the store, whatever wrote them.

Opening one catches up first: what the line files hold and no segment does is stored, unless a store
process holds the run, which does that itself. So a run without any process beside it is read as
well as one of a cluster. Queries go through an in-memory DuckDB over the segments of that instant
(`queries.py`); what to know of the run as a whole is in `identity.py`.

Suffixes: S steps, R ranks, P phases. Rank order is ascending everywhere; a value that is not known
is NaN. Where a step came again after a restart, its newest start counts, and what the restart went
back behind does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.errors import DataError
from megascale.events import Counters, Incident, Ongoing, Span
from megascale.telemetry.diagnose.straggler import COMPUTES, WAITS
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.store.catch_up import catch_up as store_the_rest
from megascale.telemetry.store.identity import Identity, Places, Start, identify
from megascale.telemetry.store.metrics_file import read_metrics
from megascale.telemetry.store.queries import Store
from megascale.telemetry.store.segments import store_folder
from megascale.telemetry.store.tables import SUM_NS
from megascale.topology import Mesh

__all__ = ["PhaseMeans", "PhaseTimes", "Places", "Run", "Start", "StepTimes", "open_run"]

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


class Run:
    """One run folder, opened by `open_run`. A context manager; not for several threads at once."""

    config: Mapping[str, Any] | None  # config.json of the run folder

    def __init__(self, run_dir: Path, folder: Path, *, catch_up: bool) -> None:
        self.run_dir, self._catch_up = run_dir, catch_up
        self.config = _read_config(run_dir / "config.json")
        self._store = Store(folder)
        self._metrics_bytes = -1
        self._identity: Identity = identify(self._store)
        self._metrics_bytes = self._size_of_metrics()

    @property
    def mesh(self) -> Mesh:
        return self._identity.mesh

    @property
    def starts(self) -> tuple[Start, ...]:
        return self._identity.starts

    @property
    def places(self) -> Places:
        return self._identity.places

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._store.close()

    def refresh(self) -> bool:
        """See what was recorded since; whether there is anything new."""
        if self._catch_up:
            store_the_rest(self.run_dir)
        grown, self._metrics_bytes = self._metrics_bytes, self._size_of_metrics()
        if not self._store.refresh():
            return grown != self._metrics_bytes
        self._identity = identify(self._store, self._identity.known)
        return True

    def steps(self) -> tuple[int, int]:
        """First and last step that any rank has finished. DataError: none has."""
        found = [start.steps for start in self.starts if start.steps is not None]
        if not found:
            raise DataError(
                f"no rank of {self.run_dir} has finished a step; ask again later, or ask reader "
                "hang what they are in"
            )
        return min(first for first, _ in found), found[-1][1]

    def bounds(self, window: Window, default_steps: int) -> tuple[int, int]:
        """The steps of `window`; where it leaves them open, the newest `default_steps`. DataError:
        the window is empty, or none of its steps is there; the message says which are."""
        first, last = self.steps()
        until = last if window.last_step is None else window.last_step
        since = window.first_step
        if since is None:
            since = max(first, min(until, last) - default_steps + 1)
        if since > until or until < first or since > last:
            raise DataError(
                f"steps {since} to {until} were asked for, {self.run_dir} has {first} to {last}"
            )
        return max(since, first), min(until, last)

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

    def number_of(self, rank: int, start: int) -> int:
        """The job's start, from the number of it in a rank's file (column `start` of tables)."""
        return self._identity.number_of(rank, start)

    def phase_means(self, first: int, last: int) -> PhaseMeans:
        phases = self.phases()
        sums = "".join(f", sum({_column(name)})::DOUBLE" for name in phases)
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
        is [-1], matrices are (S, 1)."""
        phases = self.phases()
        sums = "".join(f", avg(coalesce({_column(name)}, 0))::DOUBLE" for name in phases)
        table = self._store.table(
            f"SELECT step{sums} FROM current_sums WHERE step BETWEEN ? AND ? "
            "GROUP BY step ORDER BY step",
            (first, last),
        )
        step_S, *values = (column.to_numpy() for column in table.columns)
        known = {
            name: np.asarray(column, np.float64)[:, None]
            for name, column in zip(phases, values, strict=True)
            if np.asarray(column).any()
        }
        return PhaseTimes(step_S.astype(np.int64), np.array([-1]), known)

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

    def spans(
        self,
        first: int,
        last: int,
        *,
        ranks: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Span]:
        """Of sampled steps, by rank and time; `t0_ns` and `issued_ns` are wall-clock ns."""
        where, parameters = "step BETWEEN ? AND ?", [first, last]
        if ranks is not None:
            where += " AND rank IN (SELECT unnest(?::INTEGER[]))"
            parameters.append([int(rank) for rank in ranks])  # type: ignore[arg-type]
        if names is not None:
            where += " AND name IN (SELECT unnest(?::VARCHAR[]))"
            parameters.append(list(names))  # type: ignore[arg-type]
        rows = self._store.table(
            f"SELECT * EXCLUDE (start) FROM current_spans WHERE {where} "
            "ORDER BY rank, t0_ns, dur_ns DESC, name",
            parameters,
        ).to_pylist()
        return [Span(**{**row, "stream": row["stream"] or "compute"}) for row in rows]

    def ongoing(self) -> list[Ongoing]:
        """The newest record of each rank of the newest start; `t_ns` is wall-clock."""
        rows = self._store.table(
            "SELECT * FROM ongoing QUALIFY row_number() OVER "
            "(PARTITION BY rank, start ORDER BY t_ns DESC) = 1 ORDER BY rank"
        ).to_pylist()
        newest = len(self.starts) - 1
        found = []
        for row in rows:
            if self._identity.number_of(row["rank"], row.pop("start")) == newest:
                row["peers"] = tuple(json.loads(row["peers"] or "[]"))
                row["posted"] = json.loads(row["posted"] or "{}")
                found.append(Ongoing(**row))
        return found

    def incidents(self) -> list[tuple[int, Incident]]:
        """(number of the start, incident) in order of time; `t_ns` is wall-clock."""
        rows = self._store.table("SELECT * FROM incidents ORDER BY t_ns, rank").to_pylist()
        found = []
        for row in rows:
            number = self._identity.number_of(row["rank"], row.pop("start"))
            row["detail"] = json.loads(row["detail"] or "{}")
            found.append((number, Incident(**row)))
        return found

    def counters(self, from_unix_ns: int, to_unix_ns: int) -> list[Counters]:
        rows = self._store.table(
            "SELECT * EXCLUDE (start) FROM counters WHERE t_ns BETWEEN ? AND ? "
            "ORDER BY host, port, t_ns",
            (from_unix_ns, to_unix_ns),
        ).to_pylist()
        return [Counters(**row) for row in rows]

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in order, each with the number of its `start` and whether it
        is the newest of its step (`current`)."""
        return read_metrics(self.run_dir / "metrics.jsonl", [s.unix_ns for s in self.starts])[0]

    def caveats(self) -> list[str]:
        """What is not there: ranks without a file, dropped events, unreadable lines, a clock that
        jumped, two runs in one folder. Sentences."""
        found = [*self._identity.caveats]
        found += [
            f"segment {path.name} of the store cannot be read and is left out: {why}"
            for path, why in sorted(self._store.damaged.items())
        ]
        _, bad = read_metrics(self.run_dir / "metrics.jsonl", [])
        if bad:
            found.append(f"{bad} lines of metrics.jsonl are no JSON and are left out")
        return found

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """SQL over the tables of `tables.py`, read only; an Arrow table. Of `steps`, `sums` and
        `spans` there is a `current_` twin without the rows that a restart made void. For who may
        read this machine's files anyway: SQL can name others. DataError: no SELECT, or a wrong
        one."""
        self._store.check_select(sql)
        return self._store.table(sql, parameters)

    def _between(self, table: str, wanted: str, first: int, last: int) -> Any:
        return self._store.table(
            f"SELECT step, rank, {wanted} FROM current_{table} WHERE step BETWEEN ? AND ?",
            (first, last),
        )

    def _size_of_metrics(self) -> int:
        try:
            return (self.run_dir / "metrics.jsonl").stat().st_size
        except OSError:
            return 0


def open_run(run_dir: Path, *, catch_up: bool = True) -> Run:
    """DataError: no such folder, no run, nothing recorded yet."""
    if not run_dir.is_dir():
        raise DataError(f"there is no folder {run_dir}; give the folder of a run (job.run_dir)")
    folder = store_folder(run_dir)
    if not (run_dir / "telemetry").is_dir():
        raise DataError(
            f"{run_dir} holds no run: there is no folder telemetry in it. Give the folder of a run "
            "that was recorded (telemetry.enable = true)"
        )
    if catch_up:
        folder = store_the_rest(run_dir).folder
    run = Run(run_dir, folder, catch_up=catch_up)
    if not run.starts:
        run.close()
        raise DataError(
            f"nothing is recorded in {run_dir} yet: no rank has written its header; ask again when "
            "the run has started"
        )
    return run


def _read_config(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


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
