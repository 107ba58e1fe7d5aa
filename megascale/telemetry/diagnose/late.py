"""Who launches collectives late, so that the others wait (MegaScale 6.3, "MFU decreasing").

In a collective the last to come is not always the one to blame: it may have come late out of the
collective before, where it waited for somebody else. So what is compared is a rank's own time: from
the moment when its last collective could end (all its members were there) to its next launch. The
late one takes longer there than its peers; those that wait for it do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from megascale.telemetry.diagnose.finding import Finding

LATE_NS = 1_000_000  # at least
LATE_SHARE = 0.2  # of the peers' own time
OFTEN = 0.2  # of a rank's launches: garbage is not collected so often
LEAST = 10  # launches


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


def late_launchers(launches: Iterable[Launch], step: int | None = None) -> Finding | None:
    """Ranks that are late by their own doing in more than OFTEN of their launches."""
    own_ns = _own_times(launches)
    number: dict[int, int] = defaultdict(int)
    excesses: dict[int, list[float]] = defaultdict(list)
    for by_rank in own_ns.values():
        if len(by_rank) < 2:
            continue
        for rank, own in by_rank.items():
            usual = median(ns for other, ns in by_rank.items() if other != rank)
            number[rank] += 1
            if own - usual > max(LATE_NS, LATE_SHARE * usual):
                excesses[rank].append(own - usual)
    late = sorted(
        rank
        for rank, found in excesses.items()
        if number[rank] >= LEAST and len(found) > OFTEN * number[rank]
    )
    if not late:
        return None
    return Finding(
        kind="late_launch",
        ranks=tuple(late),
        evidence={
            "late_ms": {str(rank): round(median(excesses[rank]) / 1e6, 3) for rank in late},
            "launches": {str(rank): [len(excesses[rank]), number[rank]] for rank in late},
        },
        step=step,
    )


def _own_times(launches: Iterable[Launch]) -> dict[tuple[str, int], dict[int, int]]:
    """By collective and rank: time from the end of the rank's collective before to its launch."""
    by_rank: dict[int, list[Launch]] = defaultdict(list)
    complete_ns: dict[tuple[str, int], int] = {}
    for launch in launches:
        by_rank[launch.rank].append(launch)
        key = launch.group, launch.seq
        complete_ns[key] = max(complete_ns.get(key, launch.t_ns), launch.t_ns)
    own: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for rank, of_rank in by_rank.items():
        of_rank.sort(key=lambda launch: launch.t_ns)
        for before, launch in pairwise(of_rank):
            free_ns = complete_ns[before.group, before.seq]
            own[launch.group, launch.seq][rank] = max(0, launch.t_ns - free_ns)
    return own
