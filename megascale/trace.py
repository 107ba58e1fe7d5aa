"""Writes Chrome's trace format event by event: what chrome://tracing and Perfetto open.

What did happen (`telemetry/timeline`) and what should (`plan/simulate`) are written by this alone.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

The file never is in memory whole. A name that ends in .gz is compressed (both viewers read that),
without a time stamp, so equal events give equal bytes. It is written aside and renamed at the end.
"""

from __future__ import annotations

import gzip
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

Fields = Mapping[str, Any]

_EVENTS_A_WRITE = 2000
_line = json.JSONEncoder(separators=(",", ":"), sort_keys=True, allow_nan=False).encode


def write_json(path: Path, events: Iterable[Fields], metadata: Mapping[str, Any]) -> None:
    """The trace of `events`; `metadata` goes beside them, under "otherData"."""
    aside = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _opened(aside, compressed=path.suffix == ".gz") as file:
            for text in _text(events, metadata):
                file.write(text.encode())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _text(events: Iterable[Fields], metadata: Mapping[str, Any]) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms","traceEvents":['
    waiting: list[str] = []
    separator = "\n"
    for event in events:
        waiting.append(_line(event))
        if len(waiting) == _EVENTS_A_WRITE:
            yield separator + ",\n".join(waiting)
            separator = ",\n"
            waiting.clear()
    if waiting:
        yield separator + ",\n".join(waiting)
    yield f'\n],"otherData":{_line(metadata)}}}\n'


@contextmanager
def _opened(path: Path, *, compressed: bool) -> Iterator[IO[bytes]]:
    with path.open("wb") as raw:
        if not compressed:
            yield raw
            return
        with (
            gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=raw, mtime=0) as packed,
            io.BufferedWriter(packed, 1 << 20) as buffered,
        ):
            yield buffered


def microseconds(ns: int) -> float:
    """`ns` as the format wants it. Readers multiply by 1000 and cut: a number that would land one
    ns short of `ns` there is raised by its last bit, or spans that touch would overlap."""
    value = ns / 1000
    return value if int(value * 1000.0) >= ns else math.nextafter(value, math.inf)
