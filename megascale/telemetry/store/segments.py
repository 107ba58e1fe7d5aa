"""Segments: what the store commits, and how far each line file had been read by then.

A segment is a folder of Parquet files, a file a table, written aside under a name that begins with
a dot, made durable, and renamed into place: it is there whole or not at all, after a power loss
too. `positions.json` lies inside, so rows and the place from which to read on cannot disagree.
Numbers grow by one a commit. A merged segment is named after the numbers that it covers and hides
them, so readers list a folder that changes without a lock and see every row once:

    000000000001-000000000006   000000000003 (hidden, deleted a while later)   000000000007

There is one writer (`writing.py`); only it takes away what a killed one left half-written.
Cost: a commit of two tables is five fsyncs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megascale.errors import DataError, require_extra
from megascale.telemetry.store.tables import SUM_COUNT, SUM_NS, TABLES

POSITIONS = "positions.json"
VERSION = 1
_NAME = re.compile(r"(\d{12})(?:-(\d{12}))?")
_ASIDE, _GONE = ".aside-", ".gone-"


class Position(NamedTuple):
    """All that is needed to go on in the middle of a line file.

    offset       bytes that are stored; always the end of a line
    num_headers  headers of this rank before it: the number of its current start, and one
    shift_ns     wall clock minus the host's monotonic clock in this start; None before any header
    """

    offset: int
    rank: int
    num_headers: int = 0
    shift_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One commit, or several merged: those numbered `first` to `last`.

    written_ns  tells it from one of the same number, after the run's folder was replaced
    """

    path: Path
    first: int
    last: int
    written_ns: int = 0

    def table(self, name: str) -> Path | None:
        """Its Parquet file of a table, None where it has no rows of it."""
        path = self.path / f"{name}.parquet"
        return path if path.exists() else None

    def positions(self) -> dict[str, Position]:
        """How far the files that this commit moved were read, by source. DataError: not there any
        more, or not of this version."""
        try:
            content = json.loads((self.path / POSITIONS).read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"segment {self.path} cannot be read ({error}); list again") from None
        if content.get("version") != VERSION:
            raise DataError(
                f"segment {self.path} is of version {content.get('version')}; this program reads "
                f"{VERSION}. Delete {self.path.parent} to store the line files anew"
            )
        return {source: Position(*fields) for source, fields in content["positions"].items()}

    @property
    def num_bytes(self) -> int:
        try:
            return sum(file.stat().st_size for file in self.path.iterdir())
        except FileNotFoundError:
            return 0


def store_folder(run_dir: Path) -> Path:
    """Where the segments of a run lie."""
    return run_dir / "telemetry" / "store"


def arrow_schema(name: str, phases: Sequence[str] = ()) -> Any:
    """The Arrow schema of a table; of `sums` with the columns of these phases."""
    pa = arrow()
    columns = [(column, pa.type_for_alias(kind)) for column, kind in TABLES[name].items()]
    for phase in phases:
        columns += [(SUM_NS + phase, pa.int64()), (SUM_COUNT + phase, pa.int32())]
    return pa.schema(columns)


def live_segments(folder: Path) -> list[Segment]:
    """What readers read, in the order of the commits: no half-written one, none that a merged one
    covers. A folder that is not there has none."""
    found = []
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        try:
            written_ns = (folder / name / POSITIONS).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            continue
        first = int(match[1])
        found.append(Segment(folder / name, first, int(match[2] or first), written_ns))
    found.sort(key=lambda segment: (segment.first, -segment.last))
    live: list[Segment] = []
    for segment in found:
        if not live or segment.last > live[-1].last:
            live.append(segment)
    return live


def stored_positions(segments: Iterable[Segment]) -> dict[str, Position]:
    """How far each source is stored: the newest word on it."""
    positions: dict[str, Position] = {}
    for segment in segments:
        positions |= segment.positions()
    return positions


def next_number(folder: Path) -> int:
    segments = live_segments(folder)
    return segments[-1].last + 1 if segments else 1


def write_segment(
    folder: Path,
    tables: Mapping[str, Any],
    positions: Mapping[str, Position],
    *,
    number: int | None = None,
) -> Path:
    """Commit Arrow tables, named and typed as in `tables.py`; a table without rows is left out.

    number  of the commit, by default the next
    DataError: a segment of this name is there, or the disk refuses.
    """
    number = next_number(folder) if number is None else number
    with new_segment(folder, number, number, positions) as aside:
        for table, rows in tables.items():
            if rows.num_rows:
                with table_writer(aside, table, rows.schema) as write:
                    write(rows)
    return folder / _name(number, number)


@contextmanager
def new_segment(
    folder: Path, first: int, last: int, positions: Mapping[str, Position]
) -> Iterator[Path]:
    """A folder to put tables in (`table_writer`), which becomes segment `first` to `last` at the
    end of the context, and vanishes with an error. DataError: see `write_segment`."""
    path = folder / _name(first, last)
    aside = folder / f"{_ASIDE}{path.name}"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        fields = {s: [p.offset, p.rank, p.num_headers, p.shift_ns] for s, p in positions.items()}
        _write(aside / POSITIONS, json.dumps({"version": VERSION, "positions": fields}).encode())
        _sync(aside)
        os.rename(aside, path)
        _sync(folder)
    except OSError as error:
        raise DataError(
            f"segment {path} cannot be written ({error}); nothing is lost, the line files have it. "
            "Make room, or see who else writes there"
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def table_writer(aside: Path, name: str, schema: Any) -> Iterator[Callable[[Any], None]]:
    """Writes a table of a new segment in parts, each a row group or several; durable at the end."""
    arrow()
    from pyarrow import parquet

    _check_columns(name, schema)
    file = aside / f"{name}.parquet"
    # Numbers of ns hardly repeat: a dictionary of them costs time and is given up anyway.
    with parquet.ParquetWriter(file, schema, **_encoding(schema)) as writer:
        yield writer.write_table
    _sync(file)


def _name(first: int, last: int) -> str:
    return f"{first:012d}" if first == last else f"{first:012d}-{last:012d}"


def _encoding(schema: Any) -> dict[str, Any]:
    """How columns are written. Integers as differences: as small as by zstd, written in half its
    time and read in a third of it (12,288 ranks, 10 phases). A dictionary of ns is given up anyway.
    """
    integers = [field.name for field in schema if str(field.type) in ("int32", "int64")]
    others = [field.name for field in schema if field.name not in integers]
    return {
        "compression": dict.fromkeys(integers, "NONE") | dict.fromkeys(others, "ZSTD"),
        "compression_level": dict.fromkeys(others, 1),
        "use_dictionary": [field.name for field in schema if str(field.type) == "string"],
        "column_encoding": dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
    }


def _check_columns(name: str, schema: Any) -> None:
    phases = [column.removeprefix(SUM_NS) for column in schema.names if column.startswith(SUM_NS)]
    legal = arrow_schema(name, phases if name == "sums" else ())
    wrong = [str(field) for field in schema if field not in legal]
    missing = [column for column in ("rank", "start") if column not in schema.names]
    assert not wrong + missing, (name, wrong, missing)


def remove_segment(segment: Segment) -> None:
    """Take a segment away at once, for readers: it is renamed first."""
    gone = segment.path.with_name(_GONE + segment.path.name)
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(segment.path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def hidden_segments(folder: Path) -> list[Segment]:
    """Those that a merged one covers: nobody lists them any more."""
    live = live_segments(folder)
    hidden = []
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is not None and all(path != segment.path for segment in live):
            first = int(match[1])
            hidden.append(Segment(path, first, int(match[2] or first)))
    return hidden


def clean_aside(folder: Path) -> int:
    """Take away what a killed writer left half-written; how many. Only for who holds the lock."""
    left = [*folder.glob(f"{_ASIDE}*"), *folder.glob(f"{_GONE}*")]
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return len(left)


def arrow() -> Any:
    """pyarrow. MissingExtraError where it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise require_extra("pyarrow", "telemetry") from None
    return pyarrow


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
