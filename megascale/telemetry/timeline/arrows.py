"""Arrows between the ends of communication (MegaScale 5.1, Figure 8).

A transfer's arrow goes from the send to the computation that it feeds. A collective's arrows lead
from member to member in the order in which they came, so the last one is who the others waited for.

Both ends of an arrow exist, or there is no arrow: an end that stays alone is counted, by reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.timeline.ends import COLLECTIVE, SEND, Code, Columns


@dataclass
class Counts:
    """arrows        drawn
    lost          ends whose other end is of a rank that is drawn, and was not recorded
    outside       ends whose other end is of a rank that is not drawn
    against_time  transfers that would be used before they were sent: the clocks are apart
    """

    arrows: int = 0
    lost: int = 0
    outside: int = 0
    against_time: int = 0

    def as_json(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Arrows:
    """A-long columns: from span `out_span_A` of rank `out_rank_A` to that of the other.

    tied_A  both ends begin at one instant, and the row of the second is written first
    """

    counts: Counts
    out_rank_A: Columns
    out_span_A: Columns
    in_rank_A: Columns
    in_span_A: Columns
    code_A: Columns
    tied_A: Columns

    def __post_init__(self) -> None:
        self._in, self._out = _ByRank(self.in_rank_A), _ByRank(self.out_rank_A)

    def of_rank(self, rank: int) -> dict[int, list[Tip]]:
        """By span: the arrows that end there, then those that begin there."""
        found: dict[int, list[Tip]] = {}
        for number in self._in.numbers(rank):
            tip = Tip("f", int(number), int(self.code_A[number]), int(self.tied_A[number]))
            found.setdefault(int(self.in_span_A[number]), []).append(tip)
        for number in self._out.numbers(rank):
            tip = Tip("s", int(number), int(self.code_A[number]), 0)
            found.setdefault(int(self.out_span_A[number]), []).append(tip)
        return found


class Tip(NamedTuple):
    """One end of an arrow. phase  of the format: "s" begins it, "f" ends it.

    late_ns  after the begin of its span: a viewer has to meet the begin of an arrow first
    """

    phase: str
    number: int
    code: int
    late_ns: int


class _ByRank:
    """Numbers of arrows by the rank at one of their ends."""

    def __init__(self, ranks: Columns) -> None:
        self._order = np.argsort(ranks, kind="stable")
        self._ranks = ranks[self._order]

    def numbers(self, rank: int) -> Columns:
        first, last = np.searchsorted(self._ranks, [rank, rank + 1])
        return self._order[first:last]


def draw(ends: Mapping[str, Columns], codes: Sequence[Code], drawn: Sequence[int]) -> Arrows:
    """Arrows between `ends` (`ends.FIELDS`) of the ranks `drawn`, in order of their rows."""
    counts, shown = Counts(), set(drawn)
    position = np.zeros(max(drawn, default=0) + 1, dtype=np.int64)
    position[list(drawn)] = np.arange(len(drawn))
    ends = {**ends, "position": position[ends["rank"]]}
    is_collective = ends["kind"] == COLLECTIVE
    collectives = {name: column[is_collective] for name, column in ends.items()}
    transfers = {name: column[~is_collective] for name, column in ends.items()}
    parts = [
        _collectives(collectives, codes, shown, counts),
        _transfers(transfers, codes, shown, counts),
    ]
    columns = [np.concatenate([part[i] for part in parts]) for i in range(6)]
    counts.arrows = len(columns[0])
    return Arrows(counts, *columns)


Part = tuple[Columns, Columns, Columns, Columns, Columns, Columns]


def _collectives(
    ends: dict[str, Columns], codes: Sequence[Code], shown: set[int], counts: Counts
) -> Part:
    order = np.lexsort((ends["position"], ends["t0_ns"], ends["seq"], ends["step"], ends["code"]))
    ends = {name: column[order] for name, column in ends.items()}
    starts = _starts(ends["code"], ends["step"], ends["seq"])
    _count_absent(ends, starts, codes, shown, counts)
    same = np.ones(len(ends["rank"]), dtype=bool)
    same[starts] = False
    later = np.flatnonzero(same)
    return (
        ends["rank"][later - 1],
        ends["span"][later - 1],
        ends["rank"][later],
        ends["span"][later],
        ends["code"][later],
        np.zeros(len(later), dtype=np.int64),
    )


def _count_absent(
    ends: dict[str, Columns],
    starts: NDArray[np.int64],
    codes: Sequence[Code],
    shown: set[int],
    counts: Counts,
) -> None:
    """Members that a collective lacks: not drawn, or not recorded."""
    num_shown = {
        code: len(shown.intersection(codes[code].members)) for code in np.unique(ends["code"])
    }
    num_there = np.diff(np.append(starts, len(ends["rank"])))
    for code, there in zip(ends["code"][starts], num_there, strict=True):
        counts.lost += num_shown[code] - int(there)
        counts.outside += len(codes[code].members) - num_shown[code]


def _transfers(
    ends: dict[str, Columns], codes: Sequence[Code], shown: set[int], counts: Counts
) -> Part:
    order = np.lexsort((ends["kind"], ends["check"], ends["seq"], ends["step"], ends["code"]))
    ends = {name: column[order] for name, column in ends.items()}
    starts = _starts(ends["code"], ends["step"], ends["seq"], ends["check"])
    sizes = np.diff(np.append(starts, len(ends["rank"])))
    for alone in starts[sizes == 1]:
        source, destination = codes[ends["code"][alone]].members
        other = destination if ends["kind"][alone] == SEND else source
        if other in shown:
            counts.lost += 1
        else:
            counts.outside += 1
    sends = starts[sizes == 2]
    receives = sends + 1
    in_time = ends["into_t0_ns"][receives] >= ends["t0_ns"][sends]
    counts.against_time += int(np.sum(~in_time))
    sends, receives = sends[in_time], receives[in_time]
    at_once = ends["into_t0_ns"][receives] == ends["t0_ns"][sends]
    return (
        ends["rank"][sends],
        ends["span"][sends],
        ends["rank"][receives],
        ends["into_span"][receives],
        ends["code"][sends],
        (at_once & (ends["position"][receives] < ends["position"][sends])).astype(np.int64),
    )


def _starts(*keys: Columns) -> NDArray[np.int64]:
    """Where in sorted columns another key begins."""
    if not len(keys[0]):
        return np.empty(0, dtype=np.int64)
    new = np.zeros(len(keys[0]), dtype=bool)
    new[0] = True
    for key in keys:
        new[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(new)
