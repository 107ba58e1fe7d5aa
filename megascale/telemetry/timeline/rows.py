"""What one rank looks like in the trace format: its process, its rows, its spans with their arrows.

A process a rank, a thread a stream and lane: threads have one number everywhere. The names of a
rank's rows come before its events, as a viewer may give a name to the row that it saw last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megascale.events import Incident, Span, Step
from megascale.telemetry.timeline.arrows import Arrows, Tip
from megascale.telemetry.timeline.ends import Code
from megascale.telemetry.timeline.lanes import lanes_of
from megascale.telemetry.timeline.source import Place, RankRecord
from megascale.trace import microseconds

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
    "work",
    "derived",
)

Fields = dict[str, Any]


class _Item(NamedTuple):
    """A step or a span. number  of a span in the rank's record, which arrows know it by"""

    row: str
    t0_ns: int
    dur_ns: int
    event: Step | Span
    number: int


class Rows:
    """Trace events of one rank after the other."""

    def __init__(
        self,
        streams: Iterable[str],
        places: Mapping[int, Place | None],
        arrows: Arrows,
        codes: Sequence[Code],
    ) -> None:
        names = (*_ROWS, *sorted(set(streams) - set(_ROWS)))
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._places, self._arrows, self._codes = places, arrows, codes

    def events(self, record: RankRecord, position: int, shift_ns: int) -> Iterator[Fields]:
        """position  of the rank's rows; shift_ns  what to add to its times"""
        items = _in_order(record)
        lanes = lanes_of((item.row, item.t0_ns, item.dur_ns) for item in items)
        used = {(item.row, lane) for item, lane in zip(items, lanes, strict=True)}
        if record.incidents:
            used.add(("host", 0))
        yield from self._names(record.rank, position, used)
        arrows = self._arrows.of_rank(record.rank)
        for item, lane in zip(items, lanes, strict=True):
            begin_ns = item.t0_ns + shift_ns
            at = {"pid": record.rank, "tid": self._thread(item.row, lane)}
            yield {**at, **_slice(item, begin_ns)}
            for tip in arrows.get(item.number, ()):
                yield {**at, **self._tip(tip, begin_ns)}
        for incident in record.incidents:
            yield self._instant(incident, shift_ns)

    def _thread(self, row: str, lane: int) -> int:
        return self._numbers[row] + lane * len(self._numbers)

    def _names(self, rank: int, position: int, used: set[tuple[str, int]]) -> Iterator[Fields]:
        place = self._places.get(rank)
        yield _metadata(rank, 0, "process_name", name=_process_name(rank, place))
        yield _metadata(rank, 0, "process_sort_index", sort_index=position)
        rows = sorted(used, key=lambda row_lane: (self._numbers[row_lane[0]], row_lane[1]))
        for index, (row, lane) in enumerate(rows):
            name = f"{row} ({lane + 1})" if lane else row
            yield _metadata(rank, self._thread(row, lane), "thread_name", name=name)
            yield _metadata(rank, self._thread(row, lane), "thread_sort_index", sort_index=index)

    def _tip(self, tip: Tip, begin_ns: int) -> Fields:
        """Written right behind its span, at whose begin it lies: so a viewer ties it to that span
        and not to one inside."""
        return {
            "ph": tip.phase,
            "id": tip.number + 1,
            "bp": "e",
            "cat": "flow",
            "name": self._codes[tip.code].name,
            "ts": microseconds(begin_ns + tip.late_ns),
        }

    def _instant(self, incident: Incident, shift_ns: int) -> Fields:
        arguments = {**incident.detail}
        if incident.step is not None:
            arguments["step"] = incident.step
        return {
            "ph": "i",
            "s": "p",
            "name": incident.name,
            "cat": "incident",
            "pid": incident.rank,
            "tid": self._thread("host", 0),
            "ts": microseconds(incident.t_ns + shift_ns),
            # whatever an incident says is text for a person here
            "args": {key: str(value) for key, value in arguments.items()},
        }


def _in_order(record: RankRecord) -> list[_Item]:
    """Steps and spans by begin, an outer one before the inner one that begins with it."""
    items = [_Item("step", step.t0_ns, step.dur_ns, step, -1) for step in record.steps]
    items += [
        _Item(span.stream, span.t0_ns, span.dur_ns, span, number)
        for number, span in enumerate(record.spans)
    ]
    return sorted(items, key=lambda item: (item.t0_ns, -item.dur_ns))


def _slice(item: _Item, begin_ns: int) -> Fields:
    event = item.event
    arguments: Fields = {"step": event.step}
    name = f"step {event.step}"
    if isinstance(event, Span):
        values = {argument: getattr(event, argument) for argument in _ARGUMENTS}
        arguments = {argument: value for argument, value in values.items() if value is not None}
        name = event.name
    return {
        "ph": "X",
        "name": name,
        "cat": event.clock,
        "ts": microseconds(begin_ns),
        "dur": microseconds(item.dur_ns),
        "args": arguments,
    }


def _metadata(rank: int, thread: int, kind: str, **arguments: Any) -> Fields:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _process_name(rank: int, place: Place | None) -> str:
    if place is None:
        return f"rank {rank}"
    at = f"tp {place.tp_rank}, dp {place.dp_rank}, pp {place.pp_rank}"
    return f"rank {rank} ({at}) on {place.host}"
