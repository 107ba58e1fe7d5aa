"""Lines of JSON to rows of the store's tables, thousands at a time.

A store that parses line by line needs a core for a thousand ranks. Here the bytes of a batch are
split at newlines once, the lines told apart by how they begin, and each common kind is parsed by
Arrow as one block of JSON. What Arrow would refuse, or read as something else, goes line by line
(`odd_lines.py`): rare kinds, lines by other writers, and all that is torn, garbled or absurd, which
is counted in `unreadable` with where and why. A block that Arrow refuses is cut in pieces, so one
bad line costs its neighbours little.

Invariant: every line of a batch is a row of one table, or is counted in `unreadable`, or is blank.
`benchmarks/telemetry/ingest.py` measures it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.telemetry.path.queue import Message
from megascale.telemetry.store.batch import Batch, Integers, OddLine
from megascale.telemetry.store.odd_lines import (
    BIGGEST,
    MOST_PHASES,
    MOST_STEPS,
    TABLE_OF,
    WALL_TIMES,
    as_row,
    canonical,
    required,
)
from megascale.telemetry.store.segments import Position, arrow, arrow_schema
from megascale.telemetry.store.tables import SUM_COUNT, SUM_NS

FAST = ("sum", "step", "span", "counters")
_PIECES = 32  # of a block in which a line is bad


@dataclass(frozen=True)
class Converted:
    """Arrow tables by name, and how far each source is read with them."""

    tables: dict[str, Any]
    positions: dict[str, Position]


class Columns:
    """Turns messages into tables. It remembers the phases that it met, up to `MOST_PHASES`."""

    def __init__(self) -> None:
        self._phases: dict[str, None] = {}

    def convert(self, messages: Sequence[Message], positions: Mapping[str, Position]) -> Converted:
        """Rows of `messages`: whole lines, each message beginning where the one before it of its
        source ended, or at the source's position."""
        batch = Batch(messages, positions)
        fast = batch.lines_of(FAST)
        is_odd = np.ones(batch.num_lines, bool)
        for lines in fast.values():
            is_odd[lines] = False
        odd = list(batch.read_odd(np.flatnonzero(is_odd), self._phases))
        blocks: dict[str, list[tuple[Integers, Any]]] = {}
        for kind, lines in fast.items():
            blocks[kind] = list(self._blocks(batch, kind, lines, odd))
        for kind in FAST:
            blocks[kind] += self._canonical_block(batch, kind, odd)
        batch.place([one for one in odd if one.kind == "header"])
        parts = defaultdict[str, list[Any]](list)
        for kind, found in blocks.items():
            for lines, rows in found:
                parts[TABLE_OF[kind]].append(_placed(batch, kind, lines, rows))
        for table, rows in self._odd_rows(batch, odd).items():
            parts[table].append(rows)
        join = arrow().concat_tables
        tables = {name: join(some, promote_options="default") for name, some in parts.items()}
        return Converted(tables, batch.positions)

    def _blocks(
        self, batch: Batch, kind: str, lines: Integers, odd: list[OddLine]
    ) -> Iterator[tuple[Integers, Any]]:
        """(lines, their rows). What is no event of this kind after all goes to `odd`."""
        for block in [lines] if len(lines) else []:
            rows = self._read(kind, batch.bytes_of(block), len(block))
            if rows is not None:
                yield block, rows
                continue
            for piece in np.array_split(block, min(_PIECES, len(block))):
                rows = self._read(kind, batch.bytes_of(piece), len(piece))
                if rows is not None:
                    yield piece, rows
                else:
                    odd += batch.read_odd(piece, self._phases)

    def _canonical_block(
        self, batch: Batch, kind: str, odd: Sequence[OddLine]
    ) -> Iterator[tuple[Integers, Any]]:
        """The same for lines that were checked one by one: nothing is wrong with them, unless
        several of them have more new phases than there may be."""
        some = [(one.line, canonical(kind, one.record)) for one in odd if one.kind == kind]
        for piece in [some] if some else []:
            rows = self._read(kind, b"".join(line for _, line in piece), len(piece))
            if rows is not None:
                yield np.array([number for number, _ in piece]), rows
                continue
            for number, line in piece:
                rows = self._read(kind, line, 1)
                if rows is None:
                    batch.refuse(number, f"more than {MOST_PHASES} phases, or a number too large")
                else:
                    yield np.array([number]), rows

    def _read(self, kind: str, data: Any, count: int) -> Any:
        """Arrow rows of `count` lines; None where any is not an event of this kind."""
        pa = arrow()
        from pyarrow import json as arrow_json

        try:
            rows = arrow_json.read_json(
                pa.BufferReader(data),
                read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=arrow_json.ParseOptions(
                    explicit_schema=self._schema(kind),
                    unexpected_field_behavior="infer" if kind == "sum" else "ignore",
                ),
            )
            if rows.num_rows != count or any(rows[name].null_count for name in required(kind)):
                return None
            rows = self._widened(rows) if kind == "sum" else rows
        except pa.ArrowInvalid:
            return None
        return rows if rows is not None and _is_sane(rows) else None

    def _schema(self, kind: str) -> Any:
        pa = arrow()
        columns = list(arrow_schema(TABLE_OF[kind]).remove(1))  # `start` is not in a line
        if kind == "sum":
            leaf = pa.struct([("total_ns", pa.int64()), ("count", pa.int32())])
            phases = pa.struct([(phase, leaf) for phase in self._phases])
            columns += [("v", pa.int64()), ("kind", pa.string()), ("sums", phases)]
        return pa.schema(columns)

    def _widened(self, rows: Any) -> Any:
        """Two columns a phase in place of `sums`; None where that is no mapping of phases to whole
        numbers, or has too many. Raises ArrowInvalid where a number is not whole."""
        pa, sums = arrow(), rows["sums"].combine_chunks()
        phases = [child.name for child in sums.type]
        if sums.null_count or len(self._phases.keys() | phases) > MOST_PHASES:
            return None
        columns = {name: rows[name] for name in ("rank", "step")}
        for phase, times in zip(phases, sums.flatten(), strict=True):
            if times.null_count == len(times):
                continue
            names = [child.name for child in times.type] if pa.types.is_struct(times.type) else []
            if not {"total_ns", "count"} <= set(names):
                return None
            found = dict(zip(names, times.flatten(), strict=True))
            for name, prefix, type_ in (
                ("total_ns", SUM_NS, pa.int64()),
                ("count", SUM_COUNT, pa.int32()),
            ):
                column = found[name]
                if not pa.types.is_integer(column.type) or column.null_count != times.null_count:
                    return None
                columns[prefix + phase] = column.cast(type_)
            self._phases[phase] = None
        return pa.table(columns)

    def _odd_rows(self, batch: Batch, odd: Sequence[OddLine]) -> dict[str, Any]:
        """Tables of the kinds that are rare, and of what cannot be read."""
        pa = arrow()
        tables = {}
        for kind in TABLE_OF.keys() - set(FAST):
            some = [one for one in odd if one.kind == kind]
            if some:
                lines = np.array([one.line for one in some])
                schema = arrow_schema(TABLE_OF[kind])
                rows = pa.Table.from_pylist([as_row(one.record) for one in some], schema=schema)
                tables[TABLE_OF[kind]] = _placed(batch, kind, lines, rows.drop_columns("start"))
        refused = batch.unreadable()
        if refused:
            schema = arrow_schema("unreadable")
            tables["unreadable"] = pa.Table.from_pylist(refused, schema=schema)
        return tables


def _placed(batch: Batch, kind: str, lines: Integers, rows: Any) -> Any:
    """Rows of a table: with `start`, in wall time, of the file's own rank only."""
    pa = arrow()
    is_own = batch.is_own(lines, np.asarray(rows["rank"]))
    if not is_own.all():
        for line in lines[~is_own].tolist():
            batch.refuse(line, "says another rank than its file")
        rows, lines = rows.filter(pa.array(is_own)), lines[is_own]
    columns = {name: rows[name] for name in rows.column_names}
    columns["start"] = pa.array(batch.starts(lines), pa.int32())
    for name in WALL_TIMES.get(kind, ()):
        columns[name] = batch.at_wall_time(lines, columns[name])
    phases = [name.removeprefix(SUM_NS) for name in columns if name.startswith(SUM_NS)]
    schema = arrow_schema(TABLE_OF[kind], phases)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _is_sane(rows: Any) -> bool:
    """Whether no number is absurd (`odd_lines.BIGGEST`)."""
    return all(_is_sane_column(name, rows[name]) for name in rows.column_names)


def _is_sane_column(name: str, column: Any) -> bool:
    from pyarrow import compute, types

    if types.is_floating(column.type):
        return bool(compute.all(compute.is_finite(column), min_count=0).as_py())
    if not types.is_integer(column.type):
        return True
    low, high = (0, MOST_STEPS) if name == "step" else (-BIGGEST, BIGGEST)
    bounds = compute.min_max(column).as_py()
    return bounds["min"] is None or low <= bounds["min"] <= bounds["max"] < high
