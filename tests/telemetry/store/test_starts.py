"""Headers are counted by start of the job, and what a restart went back behind is void."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megascale.telemetry.store.starts import (
    NEVER,
    Extents,
    Headers,
    number_starts,
    steps_of,
    void_from,
)

S = 1_000_000_000


def _headers(rows: Sequence[tuple[int, int, int, float]]) -> Headers:
    """(rank, number in its file, epoch, seconds)."""
    columns = np.array([[*row[:3], row[3] * S] for row in rows], dtype=np.int64).T
    return Headers(*columns)


def test_the_nth_header_is_of_the_nth_start() -> None:
    rows = [(rank, start, 0, 100 * start + rank) for rank in range(4) for start in range(3)]
    assert number_starts(_headers(rows)).tolist() == [0, 1, 2] * 4


def test_a_rank_that_missed_a_start_is_placed_by_time() -> None:
    rows = [(rank, start, 0, 100.0 * start) for rank in range(4) for start in range(3)]
    late = [(4, 0, 0, 101.0), (4, 1, 0, 201.0)]  # not there in the first
    died = [(5, 0, 0, 2.0), (5, 1, 0, 199.0)]  # not there in the second
    assert number_starts(_headers(rows + late + died)).tolist()[-4:] == [1, 2, 0, 2]


def test_epochs_of_a_driver_are_starts() -> None:
    rows = [(0, 0, 3, 10.0), (0, 1, 5, 90.0), (1, 0, 5, 91.0)]  # rank 1 is of a new node
    assert number_starts(_headers(rows)).tolist() == [0, 1, 1]


def test_a_clock_that_went_back_changes_no_order() -> None:
    rows = [(rank, start, 0, 500.0 - 400 * start) for rank in range(2) for start in range(2)]
    assert number_starts(_headers(rows)).tolist() == [0, 1, 0, 1]


def test_what_a_restart_went_back_behind_is_void() -> None:
    assert void_from([(1, 60), (41, 80), (71, 100)]) == [41, 71, NEVER]
    assert void_from([(1, 60), (41, 45), (31, 50)]) == [31, 31, NEVER]
    assert void_from([(1, 60), None, (61, 90)]) == [61, 61, NEVER]
    assert void_from([None]) == [NEVER]


def test_steps_of_a_start_are_those_of_any_rank() -> None:
    e = Extents(*(np.array(x) for x in ([0, 1], [0, 0], [1, 1], [9, 8], [9, 9], [0, 0], [1, 1])))
    assert steps_of(np.array([0, 0]), e, 2) == [(1, 9), None]
    assert e.repeats()  # rank 1: nine records of eight steps
