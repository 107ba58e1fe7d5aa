"""What to know of a run before any question: its starts, its ranks, which rows count, and what is
not there.

Found by one pass over the columns of `steps` that say who and when, a segment at a time, and kept
by segment, so that a live run is asked only for what came since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.telemetry.store.caveats import Seen, caveats_of
from megascale.telemetry.store.queries import Store
from megascale.telemetry.store.segments import Segment
from megascale.telemetry.store.starts import (
    NEVER,
    Extents,
    Headers,
    number_starts,
    steps_of,
    void_from,
)
from megascale.topology import Mesh

Integers = NDArray[np.int64]

_EXTENTS = (
    "SELECT rank, start, min(step) AS first, max(step) AS last, count(*) AS count, "
    "min(t0_ns) AS begin_ns, max(t0_ns + dur_ns) AS end_ns FROM {one} GROUP BY rank, start"
)


@dataclass(frozen=True)
class Start:
    """One start of the job: after a restart there are several.

    number  from 0, in the order of time
    steps   first and last step that it recorded, None where it recorded none
    """

    number: int
    epoch: int
    unix_ns: int
    world_size: int
    num_ranks: int
    steps: tuple[int, int] | None


@dataclass(frozen=True)
class Places:
    """Who the ranks are, by the newest header of each."""

    rank_R: Integers
    tp_R: Integers
    dp_R: Integers
    pp_R: Integers
    host_R: Sequence[str]


@dataclass(frozen=True)
class Identity:
    """numbers  the job's start by (rank, the start's number in the rank's file)
    known    extents by segment, for the next `identify`
    """

    mesh: Mesh
    starts: tuple[Start, ...]
    places: Places
    caveats: tuple[str, ...]
    numbers: Mapping[tuple[int, int], int]
    known: Mapping[Segment, Extents] = field(default_factory=dict)

    def number_of(self, rank: int, start: int) -> int:
        """The job's start; what lies before a rank's first header belongs to the first."""
        return self.numbers.get((rank, start), 0)


def identify(store: Store, known: Mapping[Segment, Extents] | None = None) -> Identity:
    """Look at all headers and extents, and set which rows of `store` count."""
    table = store.table("SELECT * FROM ranks WHERE rank >= 0 ORDER BY rank, start")  # no nodes
    headers = Headers(*(_integers(table, n) for n in ("rank", "start", "epoch", "unix_ns")))
    by_segment = _extents(store, known or {})
    extents = _joined(list(by_segment.values()))
    number_H = number_starts(headers)
    keys = zip(headers.rank_H.tolist(), headers.start_H.tolist(), strict=True)
    numbers = dict(zip(keys, number_H.tolist(), strict=True))
    number_E = _numbers_of(numbers, extents)
    starts = _starts(table, headers, number_H, steps_of(number_E, extents, _count(number_H)))
    void = void_from([start.steps for start in starts])
    _set_what_counts(store, headers, number_H, void, repeats=extents.repeats())
    newest = number_H == (number_H.max() if len(number_H) else 0)
    mesh = _mesh(table, newest)
    seen = Seen(headers, number_H, extents, number_E, table.select(_LAYOUT).to_pydict(), mesh)
    return Identity(
        mesh=mesh,
        starts=starts,
        places=_places(table, headers, mesh),
        caveats=tuple(caveats_of(seen, store.table(_DROPPED), store.table(_UNREADABLE))),
        numbers=numbers,
        known=by_segment,
    )


_LAYOUT = ["world_size", "tensor", "data", "pipeline"]
_DROPPED = (
    'SELECT rank, start, "where", max(count) AS count FROM dropped GROUP BY ALL '
    "ORDER BY rank, start"
)
_UNREADABLE = (
    'SELECT file, why, sum(count)::BIGINT AS count, min("offset") AS first FROM unreadable '
    "GROUP BY file, why ORDER BY file, first"
)


def _extents(store: Store, known: Mapping[Segment, Extents]) -> dict[Segment, Extents]:
    found = {}
    for segment in store.segments:
        old = known.get(segment)
        if old is None:
            table = store.of_segment(segment, "steps", _EXTENTS)
            if table is None:
                continue
            names = ("rank", "start", "first", "last", "count", "begin_ns", "end_ns")
            old = Extents(*(_integers(table, name) for name in names))
        found[segment] = old
    return found


def _joined(parts: Sequence[Extents]) -> Extents:
    """Of all segments together: one row a rank and start."""
    fields = Extents.__dataclass_fields__
    if not parts:
        return Extents(*(np.zeros(0, np.int64) for _ in fields))
    all_ = {name: np.concatenate([getattr(part, name) for part in parts]) for name in fields}
    order = np.lexsort((all_["start_E"], all_["rank_E"]))
    rank, start = all_["rank_E"][order], all_["start_E"][order]
    firsts = np.flatnonzero(
        np.concatenate([[True], (rank[1:] != rank[:-1]) | (start[1:] != start[:-1])])
    )
    least, most, add = np.minimum.reduceat, np.maximum.reduceat, np.add.reduceat
    return Extents(
        rank_E=rank[firsts],
        start_E=start[firsts],
        first_E=least(all_["first_E"][order], firsts),
        last_E=most(all_["last_E"][order], firsts),
        count_E=add(all_["count_E"][order], firsts),
        begin_ns_E=least(all_["begin_ns_E"][order], firsts),
        end_ns_E=most(all_["end_ns_E"][order], firsts),
    )


def _starts(
    table: Any, headers: Headers, number_H: Integers, steps: Sequence[tuple[int, int] | None]
) -> tuple[Start, ...]:
    world_H = _integers(table, "world_size")
    return tuple(
        Start(
            number=number,
            epoch=int(headers.epoch_H[own := np.flatnonzero(number_H == number)].max()),
            unix_ns=int(headers.unix_ns_H[own].min()),
            world_size=_most_common(world_H[own]),
            num_ranks=len(np.unique(headers.rank_H[own])),
            steps=steps[number],
        )
        for number in range(len(steps))
    )


def _set_what_counts(
    store: Store, headers: Headers, number_H: Integers, void: Sequence[int], *, repeats: bool
) -> None:
    if all(step == NEVER for step in void):
        where = "TRUE"
    elif np.array_equal(headers.start_H, number_H):
        kept = [
            f"(start = {number} AND step < {step})" if step != NEVER else f"start = {number}"
            for number, step in enumerate(void)
        ]
        where = " OR ".join(kept)
    else:
        import pyarrow

        columns = {
            "rank": headers.rank_H.astype(np.int32),
            "start": headers.start_H.astype(np.int32),
            "void_from": np.array(void, np.int64)[number_H],
        }
        store.register("what_counts", pyarrow.table(columns))
        where = (
            "NOT EXISTS (SELECT 1 FROM what_counts w WHERE w.rank = counted.rank AND "
            "w.start = counted.start AND counted.step >= w.void_from)"
        )
    store.keep(where, repeats=repeats)


def _mesh(table: Any, newest: NDArray[np.bool_]) -> Mesh:
    if not len(newest):
        return Mesh()
    layouts = np.stack([_integers(table, name)[newest] for name in _LAYOUT[1:]], axis=1)
    unique, counts = np.unique(layouts, axis=0, return_counts=True)
    tensor, data, pipeline = unique[np.argmax(counts)].tolist()
    return Mesh(tensor, data, pipeline)


def _places(table: Any, headers: Headers, mesh: Mesh) -> Places:
    last = np.flatnonzero(np.append(headers.rank_H[1:] != headers.rank_H[:-1], True))
    last = last[: len(headers.rank_H)]
    rank_R = headers.rank_H[last] if len(headers.rank_H) else headers.rank_H
    hosts = table.column("host").to_pylist()
    return Places(
        rank_R=rank_R,
        tp_R=rank_R % mesh.tensor,
        dp_R=rank_R // mesh.tensor % mesh.data,
        pp_R=rank_R // (mesh.tensor * mesh.data),
        host_R=[hosts[i] or "" for i in last] if len(headers.rank_H) else [],
    )


def _numbers_of(numbers: Mapping[tuple[int, int], int], extents: Extents) -> Integers:
    keys = zip(extents.rank_E.tolist(), extents.start_E.tolist(), strict=True)
    return np.array([numbers.get(key, 0) for key in keys], np.int64)


def _integers(table: Any, name: str) -> Integers:
    values = table.column(name).to_numpy()
    return np.nan_to_num(values).astype(np.int64)


def _most_common(values: Integers) -> int:
    unique, counts = np.unique(values, return_counts=True)
    return int(unique[np.argmax(counts)])


def _count(number_H: Integers) -> int:
    return int(number_H.max()) + 1 if len(number_H) else 0
