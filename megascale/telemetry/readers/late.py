"""Which ranks launch collectives late, so that others wait, and what made them (MegaScale 6.3).

From the spans of sampled steps: a rank's own time before a launch runs from the end of its last
wait; of it, what no span fills is a gap, in which the host was late; garbage collections are spans
of their own (`launched.py`). `diagnose/late.py` says who stands out, each kind of operation by
itself; here the cause is told. Where computation fills the time, the rank is slow and not late:
reader `stragglers`.

What the last launch of a collective costs, over the window, says whether lateness grows: of ranks
that are late in turns none stands out, and collectives end later with every step all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.errors import DataError
from megascale.telemetry.diagnose.late import LATE_NS, LEAST, Lateness, lateness
from megascale.telemetry.diagnose.swing import Swing, swing
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import hosts, numbers
from megascale.telemetry.readers.launched import Launches, launched
from megascale.telemetry.shown import counted, named, seconds, table
from megascale.telemetry.store.run import Run
from megascale.topology import AXES

DEFAULT_STEPS = 400  # of which every tenth has spans
DEFAULT_GROUP = "data"
GROUPS = (*AXES, "world", "head", "vocabulary")
GARBAGE, LATE, SLOW = "garbage collection", "launches late", "computes slower"
_HALF = 0.5  # of the lateness: its cause
_SHOWN = 12

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Late:
    """A rank that stands out before one kind of operation."""

    rank: int
    kind: str
    late_s: float
    num_late: int
    num: int
    cause: str


def ask(run: Run, window: Window) -> Answer:
    first, last = run.bounds(window, DEFAULT_STEPS)
    group = window.options.get("group", DEFAULT_GROUP)
    if group not in GROUPS:
        raise DataError(f"option group is {group!r}; legal: {', '.join(GROUPS)}")
    launches = launched(run, first, last, group)
    over = f"steps {first} to {last}, group {group}"
    caveats = run.caveats()
    if not len(launches.rank_L):
        return Answer(
            "ok",
            f"no launches of collectives are recorded ({over})",
            {"first_step": first, "last_step": last, "group": group, "ranks": []},
            caveats=[*caveats, "only sampled steps have spans (telemetry.span_interval)"],
        )
    most = int(np.bincount(launches.rank_L).max())
    if most < LEAST:
        caveats.append(
            f"{counted(most, 'launch', 'launches')} a rank in this window; {LEAST} are needed to "
            "call a rank late: ask for more steps, or lower telemetry.span_interval"
        )
    named_, excess_L = stand_out(launches)
    late = [one for one in named_ if one.cause != SLOW]
    spread = swing(launches.step_L, launches.meeting_L, excess_L)
    return Answer(
        level="alert" if late else "notice" if named_ or spread.grows else "ok",
        summary=_sentence(run, named_, spread, _in_turns(launches, excess_L), over),
        data=_data(named_, spread, first, last, group),
        lines=_lines(run, named_),
        caveats=caveats,
    )


# ---------------------------------------------------------------- who, and why


def stand_out(launches: Launches) -> tuple[list[Late], Floats]:
    """(ranks that stand out, the latest first; own time of each launch less that of its peers)."""
    found: dict[int, Late] = {}
    excess_L = np.full(len(launches.rank_L), np.nan)
    for number, kind in enumerate(launches.kinds):
        of = np.flatnonzero(launches.kind_L == number)
        rank_L, meeting_L = launches.rank_L[of], launches.meeting_L[of]
        own = lateness(rank_L, meeting_L, launches.own_L[of], steady=True)
        gap = lateness(rank_L, meeting_L, launches.gap_L[of], steady=True)
        excess_L[of] = own.excess_ns_L
        for at in np.flatnonzero(own.is_late_R | gap.is_late_R).tolist():
            by = gap if gap.is_late_R[at] else own
            cause = _cause(launches, of, by, at, in_gap=bool(gap.is_late_R[at]))
            counts = int(by.num_late_R[at]), int(by.num_R[at])
            one = Late(int(by.rank_R[at]), kind, float(by.late_ns_R[at]) / 1e9, *counts, cause)
            if one.rank not in found or one.late_s > found[one.rank].late_s:
                found[one.rank] = one
    return sorted(found.values(), key=lambda one: -one.late_s), excess_L


def _cause(launches: Launches, of: Integers, by: Lateness, at: int, *, in_gap: bool) -> str:
    """What fills at least half of the time by which rank number `at` is late."""
    late = (launches.rank_L[of] == by.rank_R[at]) & (by.excess_ns_L > by.late_ns_R[at] / 2)
    garbage = float(np.median(launches.garbage_L[of][late]))
    if garbage >= _HALF * float(np.median(by.excess_ns_L[late])):
        return GARBAGE
    return LATE if in_gap else SLOW


def _in_turns(launches: Launches, excess_L: Floats) -> str:
    """What fills at least half of all the time by which launches were late."""
    late = np.nan_to_num(excess_L) > LATE_NS
    pauses = launches.garbage_L[late].sum() >= _HALF * excess_L[late].sum() > 0
    return GARBAGE if pauses else "slow operations of the host, or computation that varies"


def _sentence(run: Run, found: list[Late], spread: Swing, in_turns: str, over: str) -> str:
    late = [one for one in found if one.cause != SLOW]
    growing = (
        f"; the last launch of a collective comes {seconds(spread.first_s)} late at first and "
        f"{seconds(spread.last_s)} in the second half, by ranks in turns; cause: {in_turns}"
        if spread.grows
        else ""
    )
    if not late:
        slow = sorted(one.rank for one in found)
        verb = "computes" if len(slow) == 1 else "compute"
        rest = f"; {named(slow)} {verb} slower (ask stragglers)" if slow else ""
        return f"no rank launches late by its own doing ({over}){rest}{growing}"
    worst, ranks = late[0], sorted(one.rank for one in late)
    verb = "launches" if len(ranks) == 1 else "launch"
    causes = {one.cause for one in late}
    cause = GARBAGE if causes == {GARBAGE} else "the host is late"
    much = seconds(worst.late_s) if len(ranks) == 1 else f"up to {seconds(worst.late_s)}"
    return (
        f"{named(ranks)} on {hosts(run).get(worst.rank, '?')} {verb} {worst.kind} {much} late, and "
        f"the others of the group wait; cause: {cause} ({over}){growing}"
    )


def _data(found: list[Late], spread: Swing, first: int, last: int, group: str) -> dict[str, Any]:
    by_rank = sorted(found, key=lambda one: one.rank)
    return {
        "first_step": first,
        "last_step": last,
        "group": group,
        "ranks": [one.rank for one in by_rank if one.cause != SLOW],
        "slow_ranks": [one.rank for one in by_rank if one.cause == SLOW],
        "named": [one.rank for one in by_rank],
        "causes": [one.cause for one in by_rank],
        "kinds": [one.kind for one in by_rank],
        "late_ms": numbers(1e3 * one.late_s for one in by_rank),
        "num_late": [one.num_late for one in by_rank],
        "num_launches": [one.num for one in by_rank],
        "lost_steps": spread.step_S.tolist(),
        "lost_ms": numbers(spread.lost_s_S * 1e3),
        "lost_grows": spread.grows,
    }


def _lines(run: Run, found: list[Late]) -> list[str]:
    of = hosts(run)
    rows = [["rank", "host", "operation", "late", "launches late", "of", "cause"]]
    for one in found[:_SHOWN]:
        counts = str(one.num_late), str(one.num)
        host = of.get(one.rank, "?")
        rows.append([str(one.rank), host, one.kind, seconds(one.late_s), *counts, one.cause])
    return table(rows) if found else []
