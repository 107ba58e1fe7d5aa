"""How far the clocks of hosts are apart, by what cannot be otherwise (MegaScale 5.1).

The papers' timeline needs one clock and does not say where it comes from. Wall clocks of hosts
differ by what their time service leaves, and one that is not served may be an hour off. But ranks
meet: a collective ends nowhere before its last member has begun, and what is received was sent
before. Every such meeting says for each pair of hosts in it that a begin at the one came before an
end at the other, and so how far their clocks may be apart at most. Meetings in both directions
bound the difference from both sides; chains of meetings join hosts that never meet.

These are difference constraints. From a reference host, the largest correction that host h may have
is the shortest path to it, the smallest one the longest: both by relaxation over (host, meeting)
edges, so a collective of n hosts costs n, not n squared. The estimate is the middle, and the error,
half the width, holds for the truth: nothing is assumed about how long a message takes.

It cannot tell more than the shortest transfers in both directions allow, and it takes a clock as
one number: over a window of steps, not of days, in which clocks drift.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

# A pass joins hosts that are one meeting further apart. Bounds are valid after every pass, only
# not the tightest yet, so stopping here errs to the safe side.
_MAX_PASSES = 200
_SETTLED_NS = 1.0
_LEAST_SLACK_NS = 1_000.0


@dataclass(frozen=True)
class Meetings:
    """Every begin of a meeting came before every end of it. Hosts are numbers from 0, meetings any
    numbers; times are ns on the clock of the host.

    begin_*_B  when a member began: its launch, or the send
    end_*_E    when a member was through: its result was there, or what was received
    """

    begin_meeting_B: Integers
    begin_host_B: Integers
    begin_ns_B: Integers
    end_meeting_E: Integers
    end_host_E: Integers
    end_ns_E: Integers


@dataclass(frozen=True)
class Clocks:
    """What to add to the times of each host so that all are on one clock.

    correction_ns_H   NaN: the host shares no bounds with the reference
    error_ns_H        the true correction is at most so far off, seen from the reference
    reference         the host that the others are compared with
    contradiction_ns  by how much readings contradict each other beyond their error: a clock that
                      jumped or drifted in the window. It is in the errors twice, for a begin and an
                      end, and so they cover such a host before its jump and after it
    """

    correction_ns_H: Floats
    error_ns_H: Floats
    reference: int
    contradiction_ns: float

    @property
    def unknown(self) -> list[int]:
        return [int(host) for host in np.flatnonzero(np.isnan(self.correction_ns_H))]


def align(meetings: Meetings, num_hosts: int, *, reading_error_ns: float = 0.0) -> Clocks:
    """Corrections of `num_hosts` hosts. The half of the known hosts is corrected forwards, the half
    backwards: most wall clocks are right.

    reading_error_ns  how far each time may be off its host's clock
    """
    graph = _Graph(meetings, num_hosts)
    reference = graph.best_connected()
    slack_ns, bounds = reading_error_ns, graph.bounds(reference, reading_error_ns)
    while bounds is None:
        slack_ns = max(2 * slack_ns, _LEAST_SLACK_NS)
        bounds = graph.bounds(reference, slack_ns)
    low_ns_H, high_ns_H = bounds
    known = np.isfinite(low_ns_H) & np.isfinite(high_ns_H)
    middle_ns_H = np.full(num_hosts, np.nan)
    error_ns_H = np.full(num_hosts, np.nan)
    middle_ns_H[known] = (low_ns_H[known] + high_ns_H[known]) / 2
    contradiction_ns = slack_ns - reading_error_ns
    error_ns_H[known] = (high_ns_H[known] - low_ns_H[known]) / 2 + 2 * contradiction_ns
    return Clocks(
        correction_ns_H=middle_ns_H - np.median(middle_ns_H[known]),
        error_ns_H=error_ns_H,
        reference=reference,
        contradiction_ns=contradiction_ns,
    )


class _Graph:
    """Meetings as edges: host -> meeting by a begin, meeting -> host by an end."""

    def __init__(self, meetings: Meetings, num_hosts: int) -> None:
        self._num_hosts = num_hosts
        both = np.intersect1d(meetings.begin_meeting_B, meetings.end_meeting_E)
        begins = np.isin(meetings.begin_meeting_B, both)
        ends = np.isin(meetings.end_meeting_E, both)
        base = (
            min(meetings.begin_ns_B[begins].min(), meetings.end_ns_E[ends].min())
            if len(both)
            else 0
        )
        # whole ns up to 104 days apart are exact in float64, wall time in ns is not
        self._begin_ns = (meetings.begin_ns_B[begins] - base).astype(np.float64)
        self._end_ns = (meetings.end_ns_E[ends] - base).astype(np.float64)
        self._begin_host = meetings.begin_host_B[begins]
        self._end_host = meetings.end_host_E[ends]
        self._begin_meeting = np.searchsorted(both, meetings.begin_meeting_B[begins])
        self._end_meeting = np.searchsorted(both, meetings.end_meeting_E[ends])
        self._of_meeting_begins = _Groups(self._begin_meeting)
        self._of_meeting_ends = _Groups(self._end_meeting)
        self._of_host_begins = _Groups(self._begin_host)
        self._of_host_ends = _Groups(self._end_host)

    def best_connected(self) -> int:
        """The host in most meetings, of equals the first."""
        hosts = np.concatenate([self._begin_host, self._end_host])
        return int(np.argmax(np.bincount(hosts, minlength=self._num_hosts)))

    def bounds(self, reference: int, slack_ns: float) -> tuple[Floats, Floats] | None:
        """The least and the largest correction of every host; None where one excludes the other."""
        low, high = np.full(self._num_hosts, -np.inf), np.full(self._num_hosts, np.inf)
        low[reference] = high[reference] = 0.0
        if len(self._begin_ns) == 0:
            return low, high
        for _ in range(_MAX_PASSES):
            before_low, before_high = low.copy(), high.copy()
            # true time by which all had begun, at most: when the first was through
            latest = self._of_meeting_ends.least(self._end_ns + high[self._end_host])
            allowed = latest[self._begin_meeting] - self._begin_ns + 2 * slack_ns
            hosts = self._of_host_begins
            high[hosts.keys] = np.minimum(high[hosts.keys], hosts.least(allowed))
            earliest = self._of_meeting_begins.most(self._begin_ns + low[self._begin_host])
            needed = earliest[self._end_meeting] - self._end_ns - 2 * slack_ns
            hosts = self._of_host_ends
            low[hosts.keys] = np.maximum(low[hosts.keys], hosts.most(needed))
            if np.any(high < low):
                return None
            if _is_near(before_low, low) and _is_near(before_high, high):
                break
        return low, high


class _Groups:
    """Minima and maxima of values by an integer key."""

    def __init__(self, key: Integers) -> None:
        self._order = np.argsort(key, kind="stable")
        self.keys, self._starts = np.unique(key[self._order], return_index=True)

    def least(self, values: Floats) -> Floats:
        """By key, in the order of `keys`."""
        return np.minimum.reduceat(values[self._order], self._starts)

    def most(self, values: Floats) -> Floats:
        return np.maximum.reduceat(values[self._order], self._starts)


def _is_near(before: Floats, after: Floats) -> bool:
    moved = before != after  # infinities that stay are equal
    return bool(np.all(np.abs(before[moved] - after[moved]) < _SETTLED_NS))
