"""Which ranks launch collectives late, so that others wait, and what made them (MegaScale 6.3).

From the spans of sampled steps: a rank's own time before a launch runs from the end of its last
wait; of it, what no span fills is a gap, in which the host was late; garbage collections are spans
of their own. `diagnose/late.py` says who stands out, each kind of operation by itself; here the
cause is told. Where computation fills the time, the rank is slow and not late: reader `stragglers`.

What the last launch of a collective costs, over the window, says whether lateness grows: of ranks
that are late in turns none stands out, and collectives end later with every step all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.errors import DataError
from megascale.telemetry.diagnose.late import LATE_NS, LEAST, Lateness, lateness
from megascale.telemetry.diagnose.swing import Swing, swing
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.asking import hosts, numbers
from megascale.telemetry.shown import counted, named, seconds, table
from megascale.telemetry.standing import WAITS
from megascale.telemetry.store.run import Run
from megascale.topology import AXES, Mesh

DEFAULT_STEPS = 400  # of which every tenth has spans
DEFAULT_GROUP = "data"
GROUPS = (*AXES, "world", "head", "vocabulary")
_GARBAGE = ("gc", "gc_pause")
GARBAGE, LATE, SLOW = "garbage collection", "launches late", "computes slower"
_HALF = 0.5  # of the lateness: its cause
_SHOWN = 12

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Launches:
    """Launches of one group's collectives; all in ns but the numbers."""

    rank_L: Integers
    meeting_L: Integers
    step_L: Integers
    kind_L: Integers  # of `kinds`
    own_L: Floats  # since the end of the last wait
    gap_L: Floats  # since anything that is a span
    garbage_L: Floats  # collections in between
    kinds: tuple[str, ...]


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


# ---------------------------------------------------------------- what is in the store


def launched(run: Run, first: int, last: int, group: str) -> Launches:
    """Launches of `group` in sampled steps, with what lay before each in its step."""
    window = (first, last)
    kinds = run.query(
        "SELECT DISTINCT name, coalesce(op, '') AS op FROM current_spans "
        'WHERE step BETWEEN ? AND ? AND "group" = ? AND seq IS NOT NULL ORDER BY ALL',
        (*window, group),
    ).to_pylist()
    found = run.query(
        f"SELECT rank, step, t0_ns, dur_ns, coalesce(seq, 0) AS seq, "
        f"({_waits_in_sql()})::INTEGER AS is_wait, (name IN {_GARBAGE})::INTEGER AS is_garbage, "
        f"{_number_in_sql(kinds, group)} AS kind FROM current_spans WHERE step BETWEEN ? AND ?",
        window,
    )
    columns = {name: found[name].to_numpy().astype(np.int64) for name in found.column_names}
    order = np.lexsort((columns["t0_ns"], columns["step"], columns["rank"]))
    columns = {name: column[order] for name, column in columns.items()}
    rank, step, t0, kind = (columns[name] for name in ("rank", "step", "t0_ns", "kind"))
    is_first = np.ones(len(rank), bool)
    is_first[1:] = (rank[1:] != rank[:-1]) | (step[1:] != step[:-1])
    end, waits, garbage = t0 + columns["dur_ns"], columns["is_wait"], columns["is_garbage"]
    wait_ns = _last_before(is_first, t0, end, waits == 1)
    busy_ns = _last_before(is_first, t0, end, garbage == 0)
    of = np.flatnonzero((kind >= 0) & (wait_ns > 0) & (t0 >= wait_ns))
    paused = np.cumsum(garbage * columns["dur_ns"])[of]
    follows = np.zeros(len(of), bool)
    follows[1:] = np.cumsum(is_first)[of[1:]] == np.cumsum(is_first)[of[:-1]]
    begun = (np.cumsum(garbage * columns["dur_ns"]) - garbage * columns["dur_ns"])[
        np.flatnonzero(is_first)[np.cumsum(is_first)[of] - 1]
    ]
    since = np.where(follows, np.concatenate([[0], paused])[: len(of)], begun)
    meeting = _numbered(_instance(rank[of], group, run.mesh), step[of], columns["seq"][of])
    return Launches(
        rank_L=rank[of],
        meeting_L=meeting,
        step_L=step[of],
        kind_L=kind[of],
        own_L=(t0 - wait_ns)[of].astype(np.float64),
        gap_L=np.maximum(0, (t0 - busy_ns)[of]).astype(np.float64),
        garbage_L=(paused - since).astype(np.float64),
        kinds=tuple(f"{one['name']} {one['op']}".strip() for one in kinds),
    )


def _waits_in_sql() -> str:
    told = [
        f"(name = '{name}' AND op {'IS NULL' if op is None else 'IN (' + repr(op) + ')'})"
        for name, op in WAITS
    ]
    return " OR ".join([*told, """(starts_with(name, 'tp_') AND "group" IS NOT NULL)"""])


def _number_in_sql(kinds: Sequence[Mapping[str, str]], group: str) -> str:
    """The place in `kinds` of a launch of `group`; -1 of any other span."""
    cases = " ".join(
        f"WHEN name = '{_quoted(one['name'])}' AND coalesce(op, '') = '{_quoted(one['op'])}' "
        f"THEN {number}"
        for number, one in enumerate(kinds)
    )
    known = f"""CASE {cases} ELSE -1 END""" if kinds else "-1"
    return f"""CASE WHEN "group" = '{group}' AND seq IS NOT NULL THEN {known} ELSE -1 END"""


def _quoted(text: str) -> str:
    return text.replace("'", "''")


def _last_before(
    is_first: NDArray[np.bool_], t0: Integers, end: Integers, counts: NDArray[np.bool_]
) -> Integers:
    """By span: the latest end of the spans before it in its step that count; 0 where none does."""
    if not len(t0):
        return t0
    segment = np.cumsum(is_first) - 1
    begin = t0[is_first][segment]
    reach = int((end - begin).max()) + 2
    so_far = np.maximum.accumulate(segment * reach + np.where(counts, end - begin + 1, 0))
    before = np.concatenate([[0], so_far[:-1]]) - segment * reach
    return np.where((before > 0) & ~is_first, begin + before - 1, 0)


def _numbered(*columns: Integers) -> Integers:
    """Equal rows have one number."""
    order = np.lexsort(columns)
    differs = np.zeros(len(order), np.int64)
    for column in columns:
        differs[1:] |= column[order][1:] != column[order][:-1]
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(differs)
    return found


def _instance(rank_L: Integers, group: str, mesh: Mesh) -> Integers:
    """The number of each rank's instance of a group."""
    stage = mesh.tensor * mesh.data
    if group == "tensor":
        return rank_L // mesh.tensor
    if group == "data":
        return rank_L // stage * mesh.tensor + rank_L % mesh.tensor
    if group in ("pipeline", "head"):
        return rank_L % stage
    return rank_L % stage // mesh.tensor if group == "vocabulary" else np.zeros_like(rank_L)


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
