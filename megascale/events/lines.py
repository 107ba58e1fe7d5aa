"""Events as lines of JSON: a file a rank, one event a line, the header first."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from megascale.errors import DataError
from megascale.events.schema import (
    Anchor,
    Counters,
    Dropped,
    Event,
    Header,
    Incident,
    Ongoing,
    Span,
    Step,
    Sums,
)

SCHEMA_VERSION = 1
_KINDS: dict[str, type[Any]] = {
    cls.kind: cls
    for cls in (Header, Span, Sums, Step, Incident, Ongoing, Counters, Anchor, Dropped)
}
_FIELDS = {cls: tuple(f.name for f in fields(cls)) for cls in _KINDS.values()}


def to_line(event: Event) -> str:
    """One line of JSON with a final newline. Absent values are left out."""
    record: dict[str, Any] = {"v": SCHEMA_VERSION, "kind": event.kind}
    for name in _FIELDS[type(event)]:
        value = getattr(event, name)
        if value is not None:
            record[name] = value
    if isinstance(event, Incident):
        record["detail"] = {key: _json_number(value) for key, value in event.detail.items()}
    return json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"


def _json_number(value: Any) -> Any:
    """JSON has no NaN and no infinity; in an incident they are the message: 'nan', 'inf'."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_line(line: str | bytes) -> Event:
    """The event of one line. DataError for what this version's schema does not describe."""
    try:
        record = json.loads(line)
        version, kind = record.pop("v"), record.pop("kind")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"not an event line ({error}): {line[:120]!r}") from None
    if version != SCHEMA_VERSION or kind not in _KINDS:
        raise DataError(
            f"event of schema version {version}, kind {kind!r}; this program reads version "
            f"{SCHEMA_VERSION} with kinds {', '.join(_KINDS)}"
        )
    try:
        event: Event = _KINDS[kind](**record)
    except TypeError as error:
        raise DataError(
            f"event of kind {kind!r} has other fields ({error}): {line[:120]!r}"
        ) from None
    return event


def read_events(path: Path) -> Iterator[Event]:
    """Events of a rank's file, also while it grows: a last line without newline is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield parse_line(line)
