"""Events as a timeline that Perfetto and chrome://tracing open (MegaScale 5.1, Figure 8).

One process a rank, one thread a stream, steps in a thread of their own, incidents as instants.
Clocks of several hosts are joined by the anchor of each rank's header. The same events give the
same bytes, in whatever order the files of the ranks are read.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.errors import DataError
from megascale.events import Event, Header, Incident, Span, Step

# Order of the rows of a rank; other streams follow by name.
_ROWS = ("step", "compute", "tensor", "pipeline", "data", "host")
_ARGUMENTS = (
    "step",
    "chunk",
    "micro_batch",
    "op",
    "group",
    "seq",
    "peer",
    "num_bytes",
    "payload",
    "bucket",
    "derived",
)


@dataclass(frozen=True, slots=True)
class _Entry:
    rank: int
    row: str
    start_ns: int
    fields: dict[str, Any]


def chrome_trace(events: Iterable[Event]) -> dict[str, Any]:
    """The trace of `events` of any number of ranks, each rank's in the order of its file.

    Raises DataError where some ranks have a header, and so wall time, and others do not.
    """
    headers: dict[int, Header] = {}
    offsets: dict[int, int] = {}
    entries: list[_Entry] = []
    for event in events:
        if isinstance(event, Header):
            headers[event.rank] = event
            offsets[event.rank] = event.unix_ns - event.monotonic_ns
        elif isinstance(event, Span | Step | Incident):
            entries.append(_entry(event, offsets.get(event.rank, 0)))
    lost = sorted({entry.rank for entry in entries} - headers.keys())
    if headers and lost:
        raise DataError(
            f"ranks {lost} have no header, so their times cannot be joined with those of ranks "
            f"{sorted(headers)}; give the whole files"
        )
    return {"displayTimeUnit": "ms", "traceEvents": _trace_events(entries, headers)}


def write_trace(path: Path, events: Iterable[Event]) -> None:
    """Write the trace of `events` as JSON to `path`."""
    path.write_text(json.dumps(chrome_trace(events), separators=(",", ":"), sort_keys=True))


def _entry(event: Span | Step | Incident, offset_ns: int) -> _Entry:
    """The trace event of `event`, still without the numbers of process, thread and time."""
    if isinstance(event, Incident):
        fields: dict[str, Any] = {"ph": "i", "s": "p", "name": event.name, "cat": "incident"}
        arguments = {**event.detail, **({} if event.step is None else {"step": event.step})}
        # whatever an incident says is text for a person here
        fields["args"] = {key: str(value) for key, value in arguments.items()}
        return _Entry(event.rank, "host", event.t_ns + offset_ns, fields)
    fields = {"ph": "X", "cat": event.clock, "dur": event.dur_ns / 1000}
    if isinstance(event, Step):
        fields |= {"name": f"step {event.step}", "args": {"step": event.step}}
        return _Entry(event.rank, "step", event.t0_ns + offset_ns, fields)
    arguments = {name: getattr(event, name) for name in _ARGUMENTS}
    fields |= {
        "name": event.name,
        "args": {name: value for name, value in arguments.items() if value is not None},
    }
    return _Entry(event.rank, event.stream, event.t0_ns + offset_ns, fields)


def _trace_events(entries: list[_Entry], headers: dict[int, Header]) -> list[dict[str, Any]]:
    if not entries:
        return []
    names = sorted({entry.row for entry in entries} - set(_ROWS))
    threads = {row: number for number, row in enumerate((*_ROWS, *names), 1)}
    first_ns = min(entry.start_ns for entry in entries)
    rows = sorted({(entry.rank, threads[entry.row], entry.row) for entry in entries})
    out = []
    for rank in sorted({rank for rank, _, _ in rows}):
        out.append(_metadata(rank, 0, "process_name", name=_process_name(rank, headers.get(rank))))
        out.append(_metadata(rank, 0, "process_sort_index", sort_index=rank))
    for rank, thread, row in rows:
        out.append(_metadata(rank, thread, "thread_name", name=row))
        out.append(_metadata(rank, thread, "thread_sort_index", sort_index=thread))
    timed = [
        {
            **entry.fields,
            "pid": entry.rank,
            "tid": threads[entry.row],
            "ts": (entry.start_ns - first_ns) / 1000,
        }
        for entry in entries
    ]
    # An outer span before the inner one that starts with it, as viewers want it.
    timed.sort(
        key=lambda e: (
            e["ts"],
            e["pid"],
            e["tid"],
            -e.get("dur", 0.0),
            json.dumps(e, sort_keys=True),
        )
    )
    return out + timed


def _metadata(rank: int, thread: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _process_name(rank: int, header: Header | None) -> str:
    if header is None:
        return f"rank {rank}"
    place = f"tp {header.tp_rank}, dp {header.dp_rank}, pp {header.pp_rank}"
    return f"rank {rank} ({place}) on {header.host}"
