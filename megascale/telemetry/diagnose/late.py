"""Who launches collectives late, so that the others wait (MegaScale 6.3, "MFU decreasing").

In a collective the last to come is not always the one to blame: it may have come late out of the
collective before, where it waited for somebody else. So what is compared is a rank's own time: from
the end of its last wait to its next launch. The late one takes longer there than its peers; those
that wait for it do not. Own times are differences on one clock, so clocks of hosts need not agree.

A rank is late that is so in many launches by much, or in nearly all of them by little: of N
launches the median errs by 1.25 deviations over the root of N, so 5 % stand out of a noise of 2 %
in a dozen steps. A garbage collection now and then moves neither. Where noise itself is large, as
on a CPU that ranks share, they are early by much as often as late: only launches that are late
beyond that number count.

Suffixes: L launches, sorted by collective.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.diagnose.finding import Finding
from megascale.telemetry.diagnose.robust import MAD_TO_SIGMA

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

LATE_NS = 1_000_000  # at least
LATE_SHARE = 0.2  # of the peers' own time
OFTEN = 0.2  # of a rank's launches: garbage is not collected so often
OFTEN_SIGMAS = 5.0  # of the number of launches that are as early: they are few, so the root errs
LEAST = 10  # launches
STEADY_SHARE = 0.025  # of the peers' own time, by the median of a rank's launches
STEADY_SIGMAS = 6.0  # of that median's error


@dataclass(frozen=True)
class Launch:
    """A rank's launch of one collective.

    group   with its instance, such as "tensor 3": launches of equal (group, seq) meet
    t_ns    when the host issued it, on a clock that all ranks share
    """

    rank: int
    group: str
    seq: int
    t_ns: int


@dataclass(frozen=True)
class Lateness:
    """How late each rank is against the peers of its collectives; suffix R: ranks, ascending.

    excess_ns_L     own time less that of the peers, in the order of what was given
    late_ns_R       median of the excess, of the late launches where they are many
    num_late_R      launches that are late by much
    """

    rank_R: Integers
    is_late_R: NDArray[np.bool_]
    late_ns_R: Floats
    num_late_R: Integers
    num_R: Integers
    excess_ns_L: Floats


def late_launchers(launches: Iterable[Launch], step: int | None = None) -> Finding | None:
    """Ranks that are late by their own doing, often or always."""
    given = list(launches)
    groups: dict[tuple[str, int], int] = {}
    meeting_L = np.array(
        [groups.setdefault((a.group, a.seq), len(groups)) for a in given], np.int64
    )
    rank_L = np.array([a.rank for a in given], np.int64)
    t_ns_L = np.array([a.t_ns for a in given], np.int64)
    own_L, known_L = own_times(rank_L, meeting_L, t_ns_L)
    if not known_L.any():
        return None
    return as_finding(lateness(rank_L[known_L], meeting_L[known_L], own_L[known_L]), step)


def as_finding(found: Lateness, step: int | None = None) -> Finding | None:
    late = np.flatnonzero(found.is_late_R)
    if not len(late):
        return None
    ranks = found.rank_R[late].tolist()
    ms, number = (found.late_ns_R[late] / 1e6).round(3).tolist(), found.num_R[late].tolist()
    return Finding(
        kind="late_launch",
        ranks=tuple(ranks),
        evidence={
            "late_ms": {str(rank): value for rank, value in zip(ranks, ms, strict=True)},
            "launches": {
                str(rank): [late_ones, all_]
                for rank, late_ones, all_ in zip(
                    ranks, found.num_late_R[late].tolist(), number, strict=True
                )
            },
        },
        step=step,
    )


def own_times(
    rank_L: Integers, meeting_L: Integers, t_ns_L: Integers
) -> tuple[Floats, NDArray[np.bool_]]:
    """(own time, whether it is known) of blocking collectives: from when all members of the rank's
    collective before were there to its launch."""
    complete_ns = np.full(int(meeting_L.max(initial=-1)) + 1, np.iinfo(np.int64).min)
    np.maximum.at(complete_ns, meeting_L, t_ns_L)
    order = np.lexsort((t_ns_L, rank_L))
    before, after = order[:-1], order[1:]
    follows = rank_L[before] == rank_L[after]
    before, after = before[follows], after[follows]
    own_L, known_L = np.zeros(len(rank_L)), np.zeros(len(rank_L), bool)
    own_L[after] = np.maximum(0, t_ns_L[after] - complete_ns[meeting_L[before]])
    known_L[after] = True
    return own_L, known_L


def lateness(
    rank_L: Integers, meeting_L: Integers, own_ns_L: Floats, *, steady: bool = False
) -> Lateness:
    """Compare each launch with the others of its `meeting_L`; numbers of meetings are any.

    steady  name also who is late by little, but in nearly all launches
    """
    usual_L = _median_of_others(meeting_L, own_ns_L)
    excess_L = own_ns_L - usual_L
    rank_R, of_L = np.unique(rank_L, return_inverse=True)
    known_L = ~np.isnan(excess_L)
    much_L = known_L & (excess_L > np.maximum(LATE_NS, LATE_SHARE * np.nan_to_num(usual_L)))
    num_R = np.bincount(of_L[known_L], minlength=len(rank_R))
    num_late_R = np.bincount(of_L[much_L], minlength=len(rank_R))
    early_L = known_L & (-excess_L > np.maximum(LATE_NS, LATE_SHARE * np.nan_to_num(own_ns_L)))
    num_early_R = np.bincount(of_L[early_L], minlength=len(rank_R))
    by_chance_R = np.maximum(OFTEN * num_R, OFTEN_SIGMAS * np.sqrt(2.0 * num_early_R))
    often_R = (num_R >= LEAST) & (num_late_R - num_early_R > by_chance_R)
    median_R = _by_rank(of_L[known_L], excess_L[known_L], len(rank_R))
    steady_R = np.zeros(len(rank_R), bool)
    if steady:
        known = of_L[known_L], excess_L[known_L], usual_L[known_L]
        steady_R = _is_steady(*known, median_R, num_R)
    late_R = median_R.copy()
    if often_R.any():
        some_L = much_L & often_R[of_L]
        much_R = _by_rank(of_L[some_L], excess_L[some_L], len(rank_R))
        late_R = np.where(often_R, much_R, late_R)
    return Lateness(rank_R, often_R | steady_R, late_R, num_late_R, num_R, excess_L)


def _is_steady(
    of_L: Integers, excess_L: Floats, usual_L: Floats, median_R: Floats, num_R: Integers
) -> NDArray[np.bool_]:
    """Late in nearly all launches: the median is more than its error, by far."""
    distance_L = np.abs(excess_L - median_R[of_L])
    sigma_R = MAD_TO_SIGMA * _by_rank(of_L, distance_L, len(median_R))
    sigma_ns = float(np.median(sigma_R[num_R > 0])) if num_R.any() else 0.0
    error_R = (
        1.25 * np.maximum(sigma_ns, 0.5 * np.nan_to_num(sigma_R)) / np.sqrt(np.maximum(num_R, 1))
    )
    usual_R = _by_rank(of_L, usual_L, len(median_R))
    least_R = np.maximum(LATE_NS, STEADY_SHARE * usual_R)
    with np.errstate(invalid="ignore"):
        return (num_R >= LEAST) & (median_R > least_R) & (median_R > STEADY_SIGMAS * error_R)


def _by_rank(of_L: Integers, values_L: Floats, num_ranks: int) -> Floats:
    """[R]: the median of each rank's values; NaN where it has none."""
    order = np.lexsort((values_L, of_L))
    sorted_L, count_R = values_L[order], np.bincount(of_L, minlength=num_ranks)
    begin_R = np.concatenate([[0], np.cumsum(count_R)[:-1]])
    found = np.full(num_ranks, np.nan)
    some = np.flatnonzero(count_R)
    low = begin_R[some] + (count_R[some] - 1) // 2
    high = begin_R[some] + count_R[some] // 2
    found[some] = (sorted_L[low] + sorted_L[high]) / 2
    return found


def _median_of_others(meeting_L: Integers, values_L: Floats) -> Floats:
    """[L]: the median over the same meeting without the launch itself; NaN where it is alone."""
    order = np.lexsort((values_L, meeting_L))
    sorted_L = values_L[order]
    _, begin, count = np.unique(meeting_L[order], return_index=True, return_counts=True)
    begin_L, others_L = np.repeat(begin, count), np.repeat(count, count) - 1
    place_L = np.arange(len(order)) - begin_L
    low, high = (others_L - 1) // 2, others_L // 2
    usual = np.full(len(order), np.nan)
    some = others_L > 0
    low, high = low + (low >= place_L), high + (high >= place_L)
    usual[some] = (sorted_L[(begin_L + low)[some]] + sorted_L[(begin_L + high)[some]]) / 2
    found = np.empty(len(order))
    found[order] = usual
    return found
