"""What is missing in a run's records, or contradicts itself, as sentences. Pure.

Everything else is still shown: a caveat says what the readers could not see.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.shown import counted, named
from megascale.telemetry.store.starts import Extents, Headers
from megascale.topology import Mesh

Integers = NDArray[np.int64]

JUMP_NS = 1_000_000_000  # a clock that went back by less is read as drift
_SHOWN = 8


@dataclass(frozen=True)
class Seen:
    """number_H, number_E  the job's start of each header and extent
    layout                 world_size, tensor, data and pipeline of each header
    mesh                   of the newest start, by most of its headers
    """

    headers: Headers
    number_H: Integers
    extents: Extents
    number_E: Integers
    layout: Mapping[str, Sequence[int]]
    mesh: Mesh


def caveats_of(seen: Seen, dropped: Any, unreadable: Any) -> Iterator[str]:
    """dropped, unreadable: Arrow tables of the counts by rank and start, and by file and reason."""
    if not len(seen.number_H):
        return
    yield from _missing_ranks(seen)
    yield from _contradicting_headers(seen)
    yield from _repeated_steps(seen)
    yield from _clock_jumps(seen)
    yield from _dropped(dropped.to_pylist())
    yield from _unreadable(unreadable.to_pylist())


def _missing_ranks(seen: Seen) -> Iterator[str]:
    newest = int(seen.number_H.max())
    there = seen.headers.rank_H[seen.number_H == newest]
    missing = np.setdiff1d(np.arange(seen.mesh.world_size), there)
    if len(missing):
        yield (
            f"{named(missing.tolist())} of {seen.mesh.world_size} recorded nothing in the newest "
            "start; the others are shown"
        )
    silent = np.setdiff1d(there, seen.extents.rank_E[seen.number_E == newest])
    if len(silent) and (seen.number_E == newest).any():
        yield (
            f"{named(silent.tolist())} finished no step of the newest start, in which others did"
        )


def _contradicting_headers(seen: Seen) -> Iterator[str]:
    layouts = list(zip(*(seen.layout[name] for name in seen.layout), strict=True))
    for number in range(int(seen.number_H.max()) + 1):
        own = np.flatnonzero(seen.number_H == number)
        found = {layouts[i] for i in own}
        if len(found) > 1:
            worlds = " and ".join(
                f"{counted(world, 'rank')} (tensor {t}, data {d}, pipeline {p})"
                for world, t, d, p in sorted(found)
            )
            yield (
                f"headers of start {number} are of different worlds, {worlds}: two runs wrote to "
                "this folder; give each a job.run_dir of its own"
            )


def _repeated_steps(seen: Seen) -> Iterator[str]:
    e = seen.extents
    twice = np.flatnonzero(e.count_E > e.last_E - e.first_E + 1)
    if len(twice):
        at = twice[0]
        yield (
            f"{named(np.unique(e.rank_E[twice]).tolist())} recorded steps twice in start "
            f"{seen.number_E[at]}: they rolled back, or two runs wrote to this folder; the later "
            "record of a step counts"
        )


def _clock_jumps(seen: Seen) -> Iterator[str]:
    """A rank's next header before the end of its last step: on one host time went back."""
    e, h = seen.extents, seen.headers
    next_ns = {
        (int(rank), int(start)): int(ns)
        for rank, start, ns in zip(h.rank_H, h.start_H, h.unix_ns_H, strict=True)
    }
    jumps: dict[int, list[tuple[int, int]]] = {}
    for rank, start, end_ns, number in zip(
        e.rank_E.tolist(),
        e.start_E.tolist(),
        e.end_ns_E.tolist(),
        seen.number_E.tolist(),
        strict=True,
    ):
        after = next_ns.get((rank, start + 1))
        if after is not None and end_ns - after > JUMP_NS:
            jumps.setdefault(number, []).append((end_ns - after, rank))
    for number, found in sorted(jumps.items()):
        most_ns, _ = max(found)
        yield (
            f"the clock of {named(sorted(rank for _, rank in found))} went back by up to "
            f"{most_ns / 1e9:.1f} s between starts {number} and {number + 1}: their times are not "
            "comparable across it (or two runs wrote to this folder)"
        )


def _dropped(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if rows:
        total = sum(row["count"] or 0 for row in rows)
        ranks = sorted({row["rank"] for row in rows})
        yield (
            f"{counted(total, 'event')} of {named(ranks)} lost because a buffer was full; raise "
            "telemetry.buffer_events, or telemetry.span_interval"
        )


def _unreadable(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence a file, with every reason: an unknown version does not hide behind a torn line."""
    files = [(file, [*of]) for file, of in groupby(rows, key=lambda row: str(row["file"]))]
    for file, of in files[:_SHOWN]:
        reasons = "; ".join(
            row["why"] if row["count"] == 1 else f"{row['why']} ({row['count']} lines)"
            for row in of[:_SHOWN]
        )
        number = counted(sum(row["count"] for row in of), "line")
        yield f"left out of {file}: {number}, the first at byte {of[0]['first']}: {reasons}"
    if len(files) > _SHOWN:
        yield f"{len(files) - _SHOWN} more files have lines that are left out"
