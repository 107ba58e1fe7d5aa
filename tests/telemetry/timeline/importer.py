"""What Perfetto's importer of JSON traces makes of a file, and what it would drop without a word.

The `perfetto` package on PyPI (0.59.1) holds no trace processor, it downloads one; so this is a
model of its importer, written from its sources: times in microseconds are multiplied by 1000 and
cut to ns; events are sorted by time, those of one instant stay in the order of the file; a span
that begins inside another of its thread and ends behind it is dropped; an arrow's end is tied to
the innermost span that its thread has then, and its begin must have come before.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_FIELDS = {
    "M": {"name", "ph", "pid", "tid", "args"},
    "X": {"name", "ph", "pid", "tid", "ts", "dur", "cat", "args"},
    "i": {"name", "ph", "pid", "tid", "ts", "s", "cat", "args"},
    "s": {"name", "ph", "pid", "tid", "ts", "id", "cat", "bp"},
    "f": {"name", "ph", "pid", "tid", "ts", "id", "cat", "bp"},
}
_METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


@dataclass
class Slice:
    """A span as the importer has it."""

    event: Event
    begin_ns: int
    end_ns: int
    parent: Slice | None


@dataclass
class Imported:
    """What arrived. faults  what the importer would drop, or show otherwise than it was meant"""

    slices: list[Slice] = field(default_factory=list)
    arrows: list[tuple[Slice, Slice]] = field(default_factory=list)
    threads: dict[tuple[int, int], str] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    order: dict[int, int] = field(default_factory=dict)
    instants: list[Event] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def load(path: Path) -> dict[str, Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        trace: dict[str, Any] = json.load(file, parse_constant=_refuse)
    return trace


def import_trace(path: Path) -> Imported:
    trace = load(path)
    assert set(trace) == {"displayTimeUnit", "traceEvents", "otherData"}, set(trace)
    found = Imported(metadata=trace["otherData"])
    events = trace["traceEvents"]
    found.faults += [fault for event in events for fault in _faults_of(event)]
    if not found.faults:
        _read_names(found, events)
        _read_times(found, events)
    return found


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _faults_of(event: Event) -> list[str]:
    fields = _FIELDS.get(event.get("ph", ""))
    if fields is None or set(event) != fields:
        return [f"fields of {event}"]
    faults = []
    for name, kind in (("pid", int), ("tid", int), ("ts", float), ("dur", float)):
        value = event.get(name, kind())
        if type(value) is not kind or value < 0:
            faults.append(f"{name} of {event}")
    if type(event["name"]) is not str:
        faults.append(f"name of {event}")
    if event["ph"] in "sf" and not (type(event["id"]) is int and event["id"] > 0):
        faults.append(f"id of {event}")
    if event["ph"] == "M" and event["name"] not in _METADATA:
        faults.append(f"name of {event}")
    return faults


def _read_names(found: Imported, events: Iterable[Event]) -> None:
    """A thread's name has to come before its first event, or it may go to a namesake."""
    used: set[tuple[int, int]] = set()
    for event in events:
        key = event["pid"], event["tid"]
        if event["ph"] != "M":
            used.add(key)
            if key not in found.threads or event["pid"] not in found.processes:
                found.faults.append(f"no name before {event}")
        elif key in used:
            found.faults.append(f"a name after the first event: {event}")
        elif event["name"] == "thread_name":
            found.threads[key] = event["args"]["name"]
        elif event["name"] == "process_name":
            found.processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "process_sort_index":
            found.order[event["pid"]] = event["args"]["sort_index"]


def _read_times(found: Imported, events: Iterable[Event]) -> None:
    timed = sorted((e for e in events if e["ph"] != "M"), key=lambda e: _ns(e["ts"]))
    stacks: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    begun: dict[tuple[int, str, str], Slice] = {}
    ended: set[tuple[int, str, str]] = set()
    for event in timed:
        stack = stacks[event["pid"], event["tid"]]
        if event["ph"] == "X":
            _push(found, stack, event)
            continue
        if event["ph"] == "i":
            found.instants.append(event)
            continue
        now, key = _ns(event["ts"]), (event["id"], event["cat"], event["name"])
        top = stack[-1] if stack else None
        if top is None or not top.begin_ns <= now <= top.end_ns:
            found.faults.append(f"no span at the end of an arrow: {event}")
        elif event["ph"] == "s":
            if key in begun:
                found.faults.append(f"an arrow begins twice: {event}")
            begun[key] = top
        elif key not in begun or key in ended:
            found.faults.append(f"an arrow ends that has not begun, or twice: {event}")
        else:
            ended.add(key)
            found.arrows.append((begun[key], top))
            if begun[key].begin_ns > top.begin_ns:
                found.faults.append(f"an arrow would be turned round: {event}")
    found.faults += [f"arrow {key} has no end" for key in begun.keys() - ended]


def _push(found: Imported, stack: list[Slice], event: Event) -> None:
    begin = _ns(event["ts"])
    end = begin + _ns(event["dur"])
    while stack and stack[-1].end_ns <= begin:
        stack.pop()
    if stack and end > stack[-1].end_ns:
        found.faults.append(f"dropped, as it overlaps {stack[-1].event}: {event}")
        return
    stack.append(Slice(event, begin, end, stack[-1] if stack else None))
    found.slices.append(stack[-1])


def _ns(microseconds: float) -> int:
    return int(microseconds * 1000.0)
