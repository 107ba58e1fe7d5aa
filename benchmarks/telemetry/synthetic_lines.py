"""The store's tables as lines of the recorder's files: the way back, for small synthetic runs.

Monotonic clocks start anew with every host: a host's is behind wall time by an offset of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megascale.events import (
    Counters,
    Event,
    Header,
    Incident,
    Ongoing,
    Span,
    Step,
    Sums,
    to_line,
)
from megascale.telemetry.store.tables import SUM_COUNT, SUM_NS
from megascale.topology import Mesh

OFFSET_NS = 1_779_000_000_000_000_000


def lines_of(mesh: Mesh, tables: Mapping[str, Any]) -> dict[int, list[str]]:
    """By rank (-1: the nodes): headers first, then by step spans, sums and the step itself."""
    found: dict[int, list[tuple[tuple[int, int, int], str]]] = {}
    for name, table in tables.items():
        for row in table.to_pylist():
            for event, order in _events(mesh, name, row):
                found.setdefault(event.rank, []).append((order, to_line(event)))
    return {
        rank: [line for _, line in sorted(lines, key=lambda one: one[0])]
        for rank, lines in found.items()
    }


def _events(
    mesh: Mesh, table: str, row: dict[str, Any]
) -> Iterator[tuple[Event, tuple[int, int, int]]]:
    rank = row["rank"]
    offset = OFFSET_NS if rank < 0 else OFFSET_NS - 1_000_000_000 * (rank // 8)
    row.pop("start")
    for name in ("t0_ns", "issued_ns", "t_ns"):
        if row.get(name) is not None:
            row[name] -= offset
    step = row.get("step") or 0
    if table == "ranks":
        at = mesh.coordinates(rank)
        row["versions"] = json.loads(row["versions"] or "{}")
        yield (
            Header(
                **row,
                tp_rank=at.tp_rank,
                dp_rank=at.dp_rank,
                pp_rank=at.pp_rank,
                monotonic_ns=row["unix_ns"] - offset,
            ),
            (-1, 0, 0),
        )
    elif table == "spans":
        yield Span(**row), (step, 0, row["t0_ns"] + row["dur_ns"])
    elif table == "sums":
        sums = {
            key.removeprefix(SUM_NS): {
                "total_ns": value,
                "count": row[SUM_COUNT + key.removeprefix(SUM_NS)],
            }
            for key, value in row.items()
            if key.startswith(SUM_NS) and value is not None
        }
        yield Sums(rank=rank, step=step, sums=sums), (step, 1, 0)
    elif table == "steps":
        yield Step(**row), (step, 2, 0)
    elif table == "incidents":
        row["detail"] = json.loads(row["detail"] or "{}")
        yield Incident(**row), (step, 3, 0)
    elif table == "ongoing":
        row["peers"] = tuple(json.loads(row["peers"] or "[]"))
        row["posted"] = json.loads(row["posted"] or "{}")
        yield Ongoing(**row), (step, 4, 0)
    elif table == "counters":
        yield Counters(**row), (0, 5, row["t_ns"])
