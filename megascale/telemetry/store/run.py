"""A run as its readers see it: arrays and events out of the store, whatever wrote them.

Opening one catches up first: what the line files hold and no segment does is stored, unless a store
process holds the run, which does that itself. So a run without any process beside it is read as
well as one of a cluster. Queries go through an in-memory DuckDB over the segments of that instant.

Suffixes: S steps, R ranks, P phases. Rank order is ascending everywhere; a value that is not known
is NaN. Where a step came again after a restart, its newest start counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.events import Counters, Incident, Ongoing, Span
from megascale.telemetry.readers.answer import Window
from megascale.topology import Mesh

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Start:
    """One start of the job: after a restart there are several.

    number  from 0, in the order of time
    steps   first and last step that it recorded, None where it recorded none
    """

    number: int
    epoch: int
    unix_ns: int
    world_size: int
    num_ranks: int
    steps: tuple[int, int] | None


@dataclass(frozen=True)
class Places:
    """Who the ranks are, by the newest header of each."""

    rank_R: Integers
    tp_R: Integers
    dp_R: Integers
    pp_R: Integers
    host_R: Sequence[str]


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

    run_dir: Path
    config: Mapping[str, Any] | None  # config.json of the run folder
    mesh: Mesh
    starts: tuple[Start, ...]
    places: Places

    def refresh(self) -> bool:
        """See what was recorded since; whether there is anything new."""
        raise NotImplementedError

    def steps(self) -> tuple[int, int]:
        """First and last step that any rank has finished. DataError: none has."""
        raise NotImplementedError

    def bounds(self, window: Window, default_steps: int) -> tuple[int, int]:
        """The steps of `window`; where it leaves them open, the newest `default_steps`. DataError:
        the window is empty, or none of its steps is there; the message says which are."""
        raise NotImplementedError

    def step_times(self, first: int, last: int) -> StepTimes:
        raise NotImplementedError

    def phase_means(self, first: int, last: int) -> PhaseMeans:
        raise NotImplementedError

    def phase_times(self, first: int, last: int, phases: Sequence[str]) -> PhaseTimes:
        raise NotImplementedError

    def computed(self, first: int, last: int) -> PhaseTimes:
        """One phase "compute": forward and backward without the waits inside (`straggler.py`)."""
        raise NotImplementedError

    def spans(
        self,
        first: int,
        last: int,
        *,
        ranks: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Span]:
        """Of sampled steps, by rank and time; `t0_ns` and `issued_ns` are wall-clock ns."""
        raise NotImplementedError

    def ongoing(self) -> list[Ongoing]:
        """The newest record of each rank of the newest start; `t_ns` is wall-clock."""
        raise NotImplementedError

    def incidents(self) -> list[tuple[int, Incident]]:
        """(number of the start, incident) in order of time; `t_ns` is wall-clock."""
        raise NotImplementedError

    def counters(self, from_unix_ns: int, to_unix_ns: int) -> list[Counters]:
        raise NotImplementedError

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl in order, each with the number of its `start` and whether it is
        the newest of its step (`current`)."""
        raise NotImplementedError

    def caveats(self) -> list[str]:
        """What is not there: ranks without a file, dropped events, unreadable lines, a clock that
        jumped, two runs in one folder. Sentences."""
        raise NotImplementedError

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> Any:
        """SQL over the tables of `tables.py`, read only; an Arrow table."""
        raise NotImplementedError


def open_run(run_dir: Path, *, catch_up: bool = True) -> Run:
    """DataError: no such folder, no run, nothing recorded yet."""
    raise NotImplementedError
