"""Rows of a timeline in which spans nest or follow each other, and never overlap in part.

A viewer draws the spans of one row as a stack: what begins inside another has to end inside it, or
it is dropped without a word. Spans of one stream may overlap (work that is asynchronous, marks on
two streams), so such a span goes to the next lane of its row.
"""

from __future__ import annotations

from collections.abc import Iterable


class Lanes:
    """Gives each span of a row, in the order of begin and then of falling duration, its lane."""

    def __init__(self) -> None:
        self._open_ends_ns: list[list[int]] = []  # of each lane, outermost first

    def place(self, t0_ns: int, dur_ns: int) -> int:
        end_ns = t0_ns + dur_ns
        for lane, ends_ns in enumerate(self._open_ends_ns):
            while ends_ns and ends_ns[-1] <= t0_ns:
                ends_ns.pop()
            if not ends_ns or end_ns <= ends_ns[-1]:
                ends_ns.append(end_ns)
                return lane
        self._open_ends_ns.append([end_ns])
        return len(self._open_ends_ns) - 1


def lanes_of(intervals: Iterable[tuple[str, int, int]]) -> list[int]:
    """Lanes of (row, begin, duration) in ns, given by begin and then by falling duration."""
    rows: dict[str, Lanes] = {}
    return [rows.setdefault(row, Lanes()).place(t0, dur) for row, t0, dur in intervals]
