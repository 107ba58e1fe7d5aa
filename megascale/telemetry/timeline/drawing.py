"""One timeline over all ranks, or a choice of them (MegaScale 5.1, Figure 8).

Two passes over the ranks, each holding one at a time. The first takes the ends of communication as
numbers: they align the clocks and become arrows. The second writes. A process a rank, named by its
place and ordered as the selection says; a row a stream, the steps in a row of their own, more rows
where spans of a stream overlap; incidents as instants. The same events give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.events import Incident, Span
from megascale.telemetry.timeline.alignment import Alignment, align_hosts
from megascale.telemetry.timeline.arrows import Arrows, Counts, Tip, draw
from megascale.telemetry.timeline.ends import Code, Collector
from megascale.telemetry.timeline.groups import Groups
from megascale.telemetry.timeline.lanes import lanes_of
from megascale.telemetry.timeline.selection import Selection
from megascale.telemetry.timeline.source import Place, RankRecord, Source
from megascale.telemetry.timeline.writer import microseconds, write_json
from megascale.topology import Mesh

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


@dataclass
class Drawn:
    """What a written timeline holds.

    ranks        in order of their rows
    missing      of those, the ranks that recorded nothing
    num_dropped  events that the ranks lost while they recorded
    """

    ranks: list[int]
    missing: list[int]
    steps: tuple[int, int] | None
    num_spans: int
    num_dropped: int
    arrows: Counts
    alignment: Alignment

    def as_json(self) -> dict[str, Any]:
        return {
            "num_ranks": len(self.ranks) - len(self.missing),
            "missing_ranks": self.missing,
            "steps": self.steps,
            "num_spans": self.num_spans,
            "num_dropped_events": self.num_dropped,
            "arrows": self.arrows.as_json(),
            "clocks": self.alignment.as_json(),
        }


@dataclass
class _Seen:
    """The first pass."""

    rows: set[str] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    first_ns: dict[int, int] = field(default_factory=dict)
    num_spans: int = 0
    num_dropped: int = 0

    def add(self, record: RankRecord) -> None:
        self.ranks.add(record.rank)
        self.num_spans += len(record.spans)
        self.num_dropped += record.num_dropped
        self.rows.update(span.stream for span in record.spans)
        self.steps.update(step.step for step in record.steps)
        self.steps.update(span.step for span in record.spans if span.step is not None)
        begins = [of[0].t0_ns for of in (record.spans, record.steps) if of]
        begins += [incident.t_ns for incident in record.incidents[:1]]
        if begins:
            self.first_ns[record.rank] = min(begins)


def draw_timeline(
    source: Source, path: Path, selection: Selection | None = None, *, align: bool = True
) -> Drawn:
    """Write the timeline of `source` to `path`; compressed where that ends in .gz.

    align  put the hosts' clocks together by what their ranks waited for; else they are as recorded
    """
    ranks = (selection or Selection()).choose(source.mesh, source.places.keys())
    seen, collector = _Seen(), Collector(Groups(source.mesh or Mesh()))
    for record in source.records(ranks):
        seen.add(record)
        if source.mesh is not None:
            collector.add(record.rank, record.spans)
    ends = collector.columns()
    shown = {rank: source.places[rank] for rank in ranks if rank in source.places}
    alignment = align_hosts(ends, shown) if align else Alignment((), None, "--no-align")
    shift_ns = {
        rank: 0 if place is None else alignment.correction_ns(place.host)
        for rank, place in shown.items()
    }
    for name in ("t0_ns", "into_t0_ns"):
        ends[name] = _shifted(ends[name], ends["rank"], shift_ns)
    arrows = draw(ends, collector.codes, ranks)
    drawn = Drawn(
        ranks=ranks,
        missing=sorted(set(ranks) - seen.ranks),
        steps=(min(seen.steps), max(seen.steps)) if seen.steps else None,
        num_spans=seen.num_spans,
        num_dropped=seen.num_dropped,
        arrows=arrows.counts,
        alignment=alignment,
    )
    first_ns = min((t + shift_ns[rank] for rank, t in seen.first_ns.items()), default=0)
    page = _Page(seen.rows, shown, arrows, collector.codes)
    write_json(
        path,
        (
            event
            for position, record in enumerate(source.records(ranks))
            for event in page.events(record, position, shift_ns[record.rank] - first_ns)
        ),
        drawn.as_json(),
    )
    return drawn


def _shifted(times: Any, ranks: Any, shift_ns: Mapping[int, int]) -> Any:
    return times + [shift_ns[rank] for rank in ranks.tolist()] if len(times) else times


class _Page:
    """Trace events of one rank after the other."""

    def __init__(
        self,
        rows: set[str],
        places: Mapping[int, Place | None],
        arrows: Arrows,
        codes: Sequence[Code],
    ) -> None:
        names = (*_ROWS, *sorted(rows - set(_ROWS)))
        self._rows = {name: number for number, name in enumerate(names, 1)}
        self._places, self._arrows, self._codes = places, arrows, codes

    def events(self, record: RankRecord, position: int, shift_ns: int) -> Iterator[dict[str, Any]]:
        """Names of the rows first: a viewer gives a name to the row that it saw last."""
        rank = record.rank
        items = [("step", step.t0_ns, step.dur_ns) for step in record.steps]
        items += [(span.stream, span.t0_ns, span.dur_ns) for span in record.spans]
        order = sorted(range(len(items)), key=lambda i: (items[i][1], -items[i][2], i))
        lanes = [0] * len(items)
        for i, lane in zip(order, lanes_of(items[i] for i in order), strict=True):
            lanes[i] = lane
        threads = [self._thread(row, lane) for (row, _, _), lane in zip(items, lanes, strict=True)]
        named = {(row, lane) for (row, _, _), lane in zip(items, lanes, strict=True)}
        if record.incidents:
            named.add(("host", 0))
        yield from self._names(rank, position, named)
        arrows = self._arrows.of_rank(rank)
        num_steps = len(record.steps)
        for i in order:
            begin_us = microseconds(items[i][1] + shift_ns)
            at = {"pid": rank, "tid": threads[i], "ts": begin_us}
            if i < num_steps:
                number = record.steps[i].step
                fields = {"name": f"step {number}", "cat": record.steps[i].clock}
                yield {
                    **at,
                    "ph": "X",
                    "dur": microseconds(items[i][2]),
                    **fields,
                    "args": {"step": number},
                }
                continue
            span = record.spans[i - num_steps]
            yield {**at, "ph": "X", "dur": microseconds(items[i][2]), **_fields(span)}
            for tip in arrows.get(i - num_steps, ()):
                yield {**at, **self._tip(tip, items[i][1] + shift_ns)}
        for incident in record.incidents:
            yield self._instant(incident, microseconds(incident.t_ns + shift_ns))

    def _tip(self, tip: Tip, begin_ns: int) -> dict[str, Any]:
        """Written right behind its span, at whose begin it lies: so a viewer ties it to that span
        and not to one inside."""
        fields = {"ph": tip.phase, "id": tip.number + 1, "cat": "flow", "bp": "e"}
        return {
            **fields,
            "name": self._codes[tip.code].name,
            "ts": microseconds(begin_ns + tip.late_ns),
        }

    def _thread(self, row: str, lane: int) -> int:
        """One number for a stream and lane, everywhere."""
        return self._rows[row] + lane * len(self._rows)

    def _names(
        self, rank: int, position: int, named: set[tuple[str, int]]
    ) -> Iterator[dict[str, Any]]:
        place = self._places.get(rank)
        yield _metadata(rank, 0, "process_name", name=_process_name(rank, place))
        yield _metadata(rank, 0, "process_sort_index", sort_index=position)
        rows = sorted(named, key=lambda row_lane: (self._rows[row_lane[0]], row_lane[1]))
        for index, (row, lane) in enumerate(rows):
            name = f"{row} ({lane + 1})" if lane else row
            yield _metadata(rank, self._thread(row, lane), "thread_name", name=name)
            yield _metadata(rank, self._thread(row, lane), "thread_sort_index", sort_index=index)

    def _instant(self, incident: Incident, ts: float) -> dict[str, Any]:
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
            "ts": ts,
            # whatever an incident says is text for a person here
            "args": {key: str(value) for key, value in arguments.items()},
        }


def _fields(span: Span) -> dict[str, Any]:
    arguments = {name: getattr(span, name) for name in _ARGUMENTS}
    return {
        "name": span.name,
        "cat": span.clock,
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def _metadata(rank: int, thread: int, kind: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _process_name(rank: int, place: Place | None) -> str:
    if place is None:
        return f"rank {rank}"
    at = f"tp {place.tp_rank}, dp {place.dp_rank}, pp {place.pp_rank}"
    return f"rank {rank} ({at}) on {place.host}"
