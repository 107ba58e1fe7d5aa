"""One line at a time: rare kinds, other writers' spelling, and what is wrong with a line.

Slower by two orders than a block (`columns.py`), and exact: a line is a record whose fields are
typed as the tables say, or `Unreadable` with the reason. Fields that this version does not know are
left out. Numbers are bounded, so that sums of times cannot overflow and nobody allots an array for
step 10**18.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_args

from megascale.events import SCHEMA_VERSION, Event
from megascale.telemetry.store.tables import TABLES

TABLE_OF: Mapping[str, str] = {
    "header": "ranks",
    "sum": "sums",
    "step": "steps",
    "span": "spans",
    "ongoing": "ongoing",
    "incident": "incidents",
    "anchor": "anchors",
    "dropped": "dropped",
    "counters": "counters",
}
WALL_TIMES: Mapping[str, tuple[str, ...]] = {  # columns that the header places in wall time
    "step": ("t0_ns", "issued_ns"),
    "span": ("t0_ns", "issued_ns"),
    "ongoing": ("t_ns",),
    "incident": ("t_ns",),
    "anchor": ("t_ns",),
    "counters": ("t_ns",),
}
JSON_COLUMNS = ("versions", "detail", "peers", "posted")
BIGGEST = 1 << 62  # exclusive, of any whole number: two of them add up
MOST_STEPS = 1 << 40
MOST_PHASES = 256  # names of phases in a store
_RESYNC = b'{"v":'
_EVENTS = {event.kind: event for event in get_args(Event)}


class Unreadable(ValueError):
    """What is wrong with a line, in few words: they are counted by it."""


@cache
def required(kind: str) -> tuple[str, ...]:
    """Columns of `kind`'s table that every event has."""
    event = _EVENTS[kind]
    needed = {f.name for f in fields(event) if f.default is f.default_factory is MISSING}
    return tuple(column for column in TABLES[TABLE_OF[kind]] if column in needed)


def read_line(line: bytes, phases: Collection[str]) -> tuple[str, dict[str, Any]]:
    """(kind, checked record) of a line. `phases`: those known, where no more may come."""
    record = _record(line)
    version, kind = record.get("v"), record.get("kind")
    if version != SCHEMA_VERSION:
        raise Unreadable(f"schema version {str(version)[:20]}, not {SCHEMA_VERSION}")
    if not isinstance(kind, str) or kind not in TABLE_OF:
        raise Unreadable(f"kind {str(kind)[:20]!r} is not known")
    checked = {
        name: record[name] for name in TABLES[TABLE_OF[kind]] if record.get(name) is not None
    }
    checked.pop("start", None)
    for name in required(kind):
        if name not in checked:
            raise Unreadable(f"{kind} without {name}")
    for name, value in checked.items():
        _check(name, value, TABLES[TABLE_OF[kind]][name])
    if kind == "header":
        checked["monotonic_ns"] = record.get("monotonic_ns")
        _check("monotonic_ns", checked["monotonic_ns"], "int64")
    if kind == "sum":
        checked["sums"] = _checked_sums(record.get("sums"), phases)
    return kind, checked


def torn_in_front(line: bytes) -> bytes | None:
    """The whole line behind one that a crash tore and nobody cut off, where there is one."""
    at = line.rfind(_RESYNC)
    return line[at:] if at > 0 else None


def canonical(kind: str, record: Mapping[str, Any]) -> bytes:
    """A checked record as a line that Arrow reads."""
    return json.dumps({"v": SCHEMA_VERSION, "kind": kind, **record}).encode() + b"\n"


def as_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """A checked record as a row, its mappings and lists as JSON."""
    return {
        name: json.dumps(value) if name in JSON_COLUMNS else value for name, value in record.items()
    }


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8") from None
    except (ValueError, RecursionError):
        raise Unreadable("no JSON, or a torn line") from None
    if not isinstance(record, dict):
        raise Unreadable("no JSON object")
    return record


def _check(name: str, value: Any, kind: str) -> None:
    """Unreadable where `value` is not of the column's type, or absurd."""
    match kind:
        case "int32" | "int64":
            low = 0 if name in ("step", "world_size") else -1 if name == "rank" else -BIGGEST
            high = MOST_STEPS if name == "step" else BIGGEST
            if kind == "int32":
                low, high = max(low, -(1 << 31)), 1 << 31
            fits = isinstance(value, int) and not isinstance(value, bool) and low <= value < high
        case "double":
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            fits = fits and abs(value) < 1e300 and math.isfinite(value)
        case "bool":
            fits = isinstance(value, bool)
        case _ if name in JSON_COLUMNS:
            fits = isinstance(value, dict | list)
        case _:
            fits = isinstance(value, str) and _is_text(value)
    if not fits:
        raise Unreadable(f"{name} is no {kind}, or absurd")


def _checked_sums(sums: Any, phases: Collection[str]) -> dict[str, dict[str, int]]:
    if not isinstance(sums, dict):
        raise Unreadable("sum without sums")
    new = [phase for phase in sums if phase not in phases]
    if len(phases) + len(new) > MOST_PHASES:
        raise Unreadable(f"more than {MOST_PHASES} phases")
    checked: dict[str, dict[str, int]] = {}
    for phase, times in sums.items():
        if not isinstance(times, dict) or not _is_text(phase):
            raise Unreadable("a phase without total_ns and count")
        for name, kind in (("total_ns", "int64"), ("count", "int32")):
            _check(name, times.get(name), kind)
        checked[phase] = {"total_ns": times["total_ns"], "count": times["count"]}
    return checked


def _is_text(value: str) -> bool:
    """JSON can spell half of a surrogate pair, which is no text."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)
