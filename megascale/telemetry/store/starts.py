"""Which start of the job a rank's header belongs to, and which steps still count. Pure.

A rank's file has a header for each start of that rank; a rank that missed one has fewer than the
others, so their numbers are not the job's. Starts of one epoch of a driver belong together; without
a driver all have epoch 0, and a rank's n-th header is of the n-th start. Only a rank that has fewer
headers than others is placed by time, which needs clocks that agree to half the time between two
starts.

What a restart went back behind is void: a step counts where no later start has come to it or to
one before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Headers:
    """All headers, H of them: of a rank, and the number of it in the rank's file."""

    rank_H: Integers
    start_H: Integers
    epoch_H: Integers
    unix_ns_H: Integers


@dataclass(frozen=True)
class Extents:
    """What each rank recorded in each of its starts, E of them.

    count_E           steps, also those that came twice
    begin_ns, end_ns  wall time of the first and last of them
    """

    rank_E: Integers
    start_E: Integers
    first_E: Integers
    last_E: Integers
    count_E: Integers
    begin_ns_E: Integers
    end_ns_E: Integers

    def repeats(self) -> bool:
        """Whether a step came twice in one start: the trainer rolled back, or two runs mixed."""
        return bool((self.count_E > self.last_E - self.first_E + 1).any())


def number_starts(headers: Headers) -> Integers:
    """[H]: the number of the job's start that each header belongs to, from 0."""
    if not len(headers.rank_H):
        return np.zeros(0, np.int64)
    nth_H = _nth(headers)
    keys = np.stack([headers.epoch_H, nth_H], axis=1)
    unique, number_H = np.unique(keys, axis=0, return_inverse=True)
    number_H = number_H.reshape(-1).astype(np.int64)
    moments = np.array([np.median(headers.unix_ns_H[number_H == n]) for n in range(len(unique))])
    for epoch in np.unique(headers.epoch_H):
        numbers = np.flatnonzero(unique[:, 0] == epoch)
        of_epoch = np.flatnonzero(headers.epoch_H == epoch)
        ranks, counts = np.unique(headers.rank_H[of_epoch], return_counts=True)
        for rank in ranks[counts < len(numbers)]:
            own = of_epoch[headers.rank_H[of_epoch] == rank]
            own = own[np.argsort(nth_H[own])]
            number_H[own] = _by_time(headers.unix_ns_H[own], moments[numbers], int(numbers[0]))
    return number_H


def _nth(headers: Headers) -> Integers:
    """Which header of its rank and epoch each is."""
    order = np.lexsort((headers.start_H, headers.epoch_H, headers.rank_H))
    rank, epoch = headers.rank_H[order], headers.epoch_H[order]
    begins = np.concatenate([[True], (rank[1:] != rank[:-1]) | (epoch[1:] != epoch[:-1])])
    places = np.arange(len(order))
    nth = places - np.maximum.accumulate(np.where(begins, places, 0))
    nth_H = np.empty(len(order), np.int64)
    nth_H[order] = nth
    return nth_H


def _by_time(unix_ns: Integers, moments: Floats, first: int) -> Integers:
    """The nearest starts in time, in order, one for each header."""
    found, left = [], 0
    for place, moment in enumerate(unix_ns):
        last = len(moments) - (len(unix_ns) - place - 1)
        left += int(np.argmin(np.abs(moments[left:last] - moment)))
        found.append(first + left)
        left += 1
    return np.array(found, np.int64)


def steps_of(number_E: Integers, extents: Extents, num_starts: int) -> list[tuple[int, int] | None]:
    """First and last step of each start of the job; None where none was finished."""
    found: list[tuple[int, int] | None] = []
    for number in range(num_starts):
        own = number_E == number
        known = bool(own.any())
        found.append(
            (int(extents.first_E[own].min()), int(extents.last_E[own].max())) if known else None
        )
    return found


def void_from(steps: list[tuple[int, int] | None]) -> list[int]:
    """By start: the first step of it that a later one went back behind; NEVER where none did."""
    found, least = [], NEVER
    for own in reversed(steps):
        found.append(least)
        if own is not None:
            least = min(least, own[0])
    return found[::-1]
