"""What a store forgets when it is too large or too old, and the list of what it forgot.

Spans are nine tenths of a store and are looked at while they are fresh: those of the oldest steps
go first, then counters of ports, then all other times of the oldest segments. Who ran where
(`ranks`) and what happened (`incidents`) are small and stay, and so do the positions, or the line
files would be stored anew. A table is deleted by one unlink: a query that just opens it fails and
is asked again.

The store shrinks, the line files do not: whoever wants a run's detail back deletes its store, and
the next reader stores what the files hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megascale.telemetry.store.segments import Segment, live_segments
from megascale.telemetry.store.tables import TABLES

LOG = "deleted.jsonl"
KEPT = ("ranks", "incidents")
_FIRST = ("spans", "counters")
_ORDER = (*((name,) for name in _FIRST), tuple(t for t in TABLES if t not in (*_FIRST, *KEPT)))


@dataclass(frozen=True)
class Deleted:
    """A table of a segment that is gone. Steps are None where its rows have none.

    why  "size" or "age"
    """

    unix_s: float
    segment: str
    table: str
    num_bytes: int
    why: str
    first_step: int | None
    last_step: int | None


def retain(folder: Path, *, keep_bytes: float, keep_s: float, now_s: float) -> list[Deleted]:
    """Delete what is too much, oldest first, and list it. Only for who holds the store's lock.

    now_s  wall clock
    """
    segments = live_segments(folder)
    gone = []
    for segment, table in _too_old(segments, now_s - keep_s):
        gone += _delete(segment, table, "age", now_s)
    too_many = sum(segment.num_bytes for segment in segments) - keep_bytes
    for segment, table in _oldest_first(segments):
        if too_many <= 0:
            break
        deleted = _delete(segment, table, "size", now_s)
        too_many -= sum(one.num_bytes for one in deleted)
        gone += deleted
    if gone:
        with (folder / LOG).open("a") as log:
            log.writelines(json.dumps(asdict(one)) + "\n" for one in gone)
    return gone


def deleted(folder: Path) -> list[Deleted]:
    """All that was ever deleted of a store, in order."""
    try:
        lines = (folder / LOG).read_text().splitlines()
    except FileNotFoundError:
        return []
    return [Deleted(**json.loads(line)) for line in lines]


def _too_old(segments: Sequence[Segment], before_s: float) -> Iterator[tuple[Segment, str]]:
    for segment in segments:
        with suppress(FileNotFoundError):
            if segment.path.stat().st_mtime < before_s:
                yield from ((segment, table) for table in TABLES if table not in KEPT)


def _oldest_first(segments: Sequence[Segment]) -> Iterator[tuple[Segment, str]]:
    for tables in _ORDER:
        for segment in segments:
            yield from ((segment, table) for table in tables)


def _delete(segment: Segment, table: str, why: str, now_s: float) -> list[Deleted]:
    file = segment.table(table)
    if file is None:
        return []
    first, last = _steps(file)
    size = file.stat().st_size
    os.unlink(file)
    return [Deleted(now_s, segment.path.name, table, size, why, first, last)]


def _steps(file: Path) -> tuple[int | None, int | None]:
    """First and last step of a table, from its statistics."""
    from pyarrow import parquet

    metadata = parquet.read_metadata(file)
    columns = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    if "step" not in columns:
        return None, None
    at = columns.index("step")
    groups = (metadata.row_group(g).column(at).statistics for g in range(metadata.num_row_groups))
    known = [statistics for statistics in groups if statistics and statistics.has_min_max]
    if not known:
        return None, None
    return min(s.min for s in known), max(s.max for s in known)
