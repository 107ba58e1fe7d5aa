"""Small segments become big ones, in the background: readers open tens of files, not thousands.

The newest neighbours are merged once there are `FAN` of them of which none outweighs those behind
it, so a row is rewritten a few times, not at every commit. Rows keep their order, which is that of
time, so that a query of few steps passes over most row groups. Memory is that of a row group.

A merged segment hides what it covers from the instant of its rename. What is hidden is deleted
`GRACE_S` later, for readers that listed before: a reader whose file is gone lists again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megascale.telemetry.store.segments import (
    Segment,
    arrow,
    hidden_segments,
    live_segments,
    new_segment,
    remove_segment,
    stored_positions,
    table_writer,
)
from megascale.telemetry.store.tables import TABLES

FAN = 8
MOST_BYTES = 256 << 20  # of a merged segment, about
GROUP_ROWS = 131_072
GRACE_S = 60.0


def due(segments: Sequence[Segment], fan: int = FAN) -> list[Segment]:
    """The newest segments that should become one, none where it is too early."""
    chosen: list[Segment] = []
    total = 0
    for segment in reversed(segments):
        size = segment.num_bytes
        if total + size > MOST_BYTES or (len(chosen) >= fan and size > total):
            break
        if size > max(total, MOST_BYTES // fan):
            break
        chosen.append(segment)
        total += size
    return chosen[::-1] if len(chosen) >= fan else []


def merge(folder: Path, segments: Sequence[Segment]) -> Path:
    """One segment of neighbours. Only for who holds the store's lock. DataError: the disk refuses,
    or is not what it was."""
    positions = stored_positions(segments)
    first, last = segments[0].first, segments[-1].last
    with new_segment(folder, first, last, positions) as aside:
        for name in TABLES:
            files = [file for segment in segments if (file := segment.table(name)) is not None]
            if files:
                _join(aside, name, files)
    return folder / aside.name.removeprefix(".aside-")


def _join(aside: Path, name: str, files: Sequence[Path]) -> None:
    pa = arrow()
    from pyarrow import parquet

    schema = pa.unify_schemas([parquet.read_schema(file) for file in files])
    with table_writer(aside, name, schema.remove_metadata()) as write:
        for rows in _row_groups(files, schema.remove_metadata()):
            write(rows)


def _row_groups(files: Sequence[Path], schema: Any) -> Iterator[Any]:
    """All rows in order, `GROUP_ROWS` or a little more at a time."""
    pa = arrow()
    from pyarrow import parquet

    waiting: list[Any] = []
    for file in files:
        with parquet.ParquetFile(file) as source:
            for group in range(source.num_row_groups):
                rows = source.read_row_group(group, use_threads=False)
                waiting.append(_with_columns(rows, schema))
                if sum(part.num_rows for part in waiting) >= GROUP_ROWS:
                    yield pa.concat_tables(waiting).combine_chunks()
                    waiting = []
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _with_columns(rows: Any, schema: Any) -> Any:
    """With nulls for the phases that it does not have."""
    pa, names = arrow(), set(rows.column_names)
    columns = [
        rows[field.name] if field.name in names else pa.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def merge_what_is_due(folder: Path, *, fan: int = FAN) -> int:
    """Merge once, where it is time, and delete what has been hidden for long; how many segments
    became one. Only for who holds the store's lock."""
    delete_hidden(folder)
    chosen = due(live_segments(folder), fan)
    if chosen:
        merge(folder, chosen)
    return len(chosen)


def delete_hidden(folder: Path, grace_s: float = GRACE_S) -> None:
    """Delete what a merged segment has covered for `grace_s`."""
    live = live_segments(folder)
    for segment in hidden_segments(folder):
        with suppress(FileNotFoundError):
            cover = next(s for s in live if s.first <= segment.first and segment.last <= s.last)
            if time.time() - cover.path.stat().st_mtime > grace_s:
                remove_segment(segment)
