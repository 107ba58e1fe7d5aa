"""A simulated step in Chrome's trace format, as `megascale trace` draws a recorded one.

A process a stage, a row a lane, names as the recorder gives them; an arrow from each send to its
receive. Every span is of the category "simulated", and "otherData" says it of the whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from megascale.errors import ConfigError
from megascale.plan.simulate.timeline import COMPUTE_LANE, DATA_LANE, HOST_LANE, Timeline
from megascale.plan.simulate.timeline import SimulatedSpan as Span
from megascale.trace import microseconds, write_json

_ROWS = (
    "step",
    COMPUTE_LANE,
    "recv activation",
    "send activation",
    "recv gradient",
    "send gradient",
    "head",
    DATA_LANE,
    HOST_LANE,
)
_THREADS = {row: number for number, row in enumerate(_ROWS, 1)}

Fields = dict[str, Any]


def check_trace_path(path: Path) -> None:
    """Raises ConfigError where a trace could not be written to `path`."""
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(
            f"the trace was to be written to {path}; its name must end in .json, or in .json.gz to "
            "be compressed (viewers open both)"
        )
    if os.path.isdir(path):
        raise ConfigError(f"the trace was to be written to {path}, a folder; name a file in it")
    folder = path.absolute().parent
    if not os.path.lexists(folder):
        near = next(one for one in folder.parents if one.is_dir())
        raise ConfigError(
            f"the trace was to be written to {path}: the folder {folder} does not exist; make it, "
            f"or write into {near}"
        )
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def write_trace(timeline: Timeline, path: Path, metadata: Mapping[str, Any]) -> None:
    """The timeline at `path`; `metadata` says what was simulated."""
    check_trace_path(path)
    about = {**metadata, "simulated": True, "step_s": timeline.step_s}
    try:
        write_json(path, _events(timeline), about)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the trace cannot be written to {path}: {error.strerror}; name a file in a folder that "
        "may be written to"
    )


def _events(timeline: Timeline) -> Iterator[Fields]:
    for stage in range(timeline.num_stages):
        spans = timeline.spans(stage)
        yield from _names(timeline, stage, {span.lane for span in spans})
        yield _slice(Span(stage, "step", "step", None, None, 0.0, timeline.step_s))
        for span in spans:
            yield _slice(span)
            if span.kind in ("send", "recv"):
                yield _arrow_end(span)


def _names(timeline: Timeline, stage: int, lanes: set[str]) -> Iterator[Fields]:
    chunks = " ".join(map(str, timeline.chunks_of(stage)))
    name = f"stage {stage} of {timeline.num_stages} (chunks {chunks})"
    yield _metadata(stage, 0, "process_name", name=name)
    yield _metadata(stage, 0, "process_sort_index", sort_index=stage)
    for row in _ROWS:
        if row == "step" or row in lanes:
            thread = _THREADS[row]
            yield _metadata(stage, thread, "thread_name", name=row)
            yield _metadata(stage, thread, "thread_sort_index", sort_index=thread)


def _metadata(stage: int, thread: int, kind: str, **arguments: Any) -> Fields:
    return {"ph": "M", "pid": stage, "tid": thread, "name": kind, "args": arguments}


def _slice(span: Span) -> Fields:
    values = {"chunk": span.chunk, "micro_batch": span.micro_batch, "op": span.what or None}
    start_ns = _ns(span.start_s)
    return {
        "ph": "X",
        "name": span.kind,
        "cat": "simulated",
        "pid": span.stage,
        "tid": _THREADS[span.lane],
        "ts": microseconds(start_ns),
        "dur": microseconds(_ns(span.end_s) - start_ns),
        "args": {name: value for name, value in values.items() if value is not None},
    }


def _arrow_end(span: Span) -> Fields:
    """Written right behind its span. Both ends of a transfer begin at one instant: the receive's is
    put 1 ns later, as a viewer has to meet the begin of an arrow first."""
    is_send = span.kind == "send"
    start_ns = _ns(span.start_s)
    late_ns = 0 if is_send else min(1, _ns(span.end_s) - start_ns)
    return {
        "ph": "s" if is_send else "f",
        "id": span.transfer,
        "bp": "e",
        "cat": "flow",
        "name": span.what,
        "pid": span.stage,
        "tid": _THREADS[span.lane],
        "ts": microseconds(start_ns + late_ns),
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
