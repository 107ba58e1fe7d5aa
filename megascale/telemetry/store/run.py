"""A run as its readers see it: arrays and events out of the store, whatever wrote them.

Opening one catches up first: what the line files hold and no segment does is stored, unless a store
process holds the run, which does that itself. So a run without any process beside it is read as
well as one of a cluster. Queries go through an in-memory DuckDB over the segments of that instant
(`queries.py`); what to know of the run as a whole is in `identity.py`.

Where a step came again after a restart, its newest start counts, and what the restart went back
behind does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megascale.errors import DataError
from megascale.events import Counters, Incident, Ongoing, Span
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.shown import counted
from megascale.telemetry.store.arrays import Arrays, PhaseMeans, PhaseTimes, StepTimes
from megascale.telemetry.store.catch_up import Progress
from megascale.telemetry.store.catch_up import catch_up as store_the_rest
from megascale.telemetry.store.identity import Identity, Places, Start, identify
from megascale.telemetry.store.metrics_file import MetricsFile, read_metrics
from megascale.telemetry.store.queries import Store
from megascale.telemetry.store.segments import store_folder
from megascale.topology import Mesh

__all__ = ["PhaseMeans", "PhaseTimes", "Places", "Run", "Start", "StepTimes", "open_run"]


class Run(Arrays):
    """One run folder, opened by `open_run`. A context manager; not for several threads at once."""

    config: Mapping[str, Any] | None  # config.json of the run folder

    def __init__(self, run_dir: Path, folder: Path, *, catch_up: bool) -> None:
        self.run_dir, self._catch_up = run_dir, catch_up
        self.config = _read_config(run_dir / "config.json")
        self._store = Store(folder)
        self._identity: Identity = identify(self._store)
        self._metrics = self._read_metrics()

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

    def again(self) -> Run:
        """Another one over the same store, for another thread; this one alone catches up.
        DataError: as `refresh`."""
        other = Run(self.run_dir, self._store.folder, catch_up=False)
        try:
            other._refuse_nothing()
        except DataError:
            other.close()
            raise
        return other

    def refresh(self) -> bool:
        """See what was recorded since; whether there is anything new. Another run may have come in
        the place of this one. DataError: the run's folder is gone, or nothing is in it yet."""
        if not (self.run_dir / "telemetry").is_dir():
            raise DataError(f"{self.run_dir} is gone, or holds no run any more")
        folder = self._store.folder
        if self._catch_up:
            folder = store_the_rest(self.run_dir).folder
        if folder != self._store.folder:  # its disk has become full, or has room again
            self._store.close()
            self._store, is_new = Store(folder), True
            self._identity = identify(self._store)
        elif is_new := self._store.refresh():
            self._identity = identify(self._store, self._identity.known)
        self._refuse_nothing()
        self.config = _read_config(self.run_dir / "config.json")
        before, self._metrics = self._metrics, self._read_metrics()
        return is_new or len(self._metrics.lines) != len(before.lines)

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

    def number_of(self, rank: int, start: int) -> int:
        """The job's start, from the number of it in a rank's file (column `start` of tables)."""
        return self._identity.number_of(rank, start)

    def spans(
        self,
        first: int,
        last: int,
        *,
        ranks: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Span]:
        """Of sampled steps, by rank and time; `t0_ns` and `issued_ns` are wall-clock ns. Of a step
        that came twice in one start both are here."""
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
        return self._metrics.lines

    def caveats(self) -> list[str]:
        """What is not there: ranks without a file, dropped events, unreadable lines, a clock that
        jumped, two runs in one folder. Sentences."""
        found = [*self._identity.caveats]
        found += [
            f"segment {path.name} of the store cannot be read and is left out: {why}"
            for path, why in sorted(self._store.damaged.items())
        ]
        usual = store_folder(self.run_dir)
        if self._store.folder != usual:
            found.append(
                f"{usual} cannot be written (its disk is full, or it is not yours): the run is "
                f"stored in {self._store.folder}"
            )
        bad = self._metrics.num_bad
        if bad:
            found.append(f"{counted(bad, 'line')} of metrics.jsonl are no JSON and are left out")
        return found

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """SQL over the tables of `tables.py`, read only; an Arrow table. Of `steps`, `sums` and
        `spans` there is a `current_` twin without the rows that a restart made void. For who may
        read this machine's files anyway: SQL can name others. DataError: no SELECT, or a wrong
        one."""
        self._store.check_select(sql)
        return self._store.table(sql, parameters)

    def _refuse_nothing(self) -> None:
        if not self.starts:
            raise DataError(
                f"nothing is recorded in {self.run_dir} yet: no rank has written its header; ask "
                "again when the run has started"
            )

    def _read_metrics(self) -> MetricsFile:
        return read_metrics(self.run_dir / "metrics.jsonl", [s.unix_ns for s in self.starts])


def open_run(run_dir: Path, *, catch_up: bool = True, progress: Progress | None = None) -> Run:
    """DataError: no such folder, no run, nothing recorded yet.

    catch_up  first store what the line files hold beyond the segments, and at every `refresh`
    progress  called with (bytes done, bytes to do) meanwhile
    """
    if not run_dir.is_dir():
        raise DataError(f"there is no folder {run_dir}; give the folder of a run (job.run_dir)")
    folder = store_folder(run_dir)
    if not (run_dir / "telemetry").is_dir():
        raise DataError(
            f"{run_dir} holds no run: there is no folder telemetry in it. Give the folder of a run "
            "that was recorded (telemetry.enable = true)"
        )
    if catch_up:
        folder = store_the_rest(run_dir, progress=progress).folder
    run = Run(run_dir, folder, catch_up=catch_up)
    try:
        run._refuse_nothing()
    except DataError:
        run.close()
        raise
    return run


def _read_config(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
