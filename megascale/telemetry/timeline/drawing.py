"""One timeline over all ranks, or a choice of them (MegaScale 5.1, Figure 8).

Two passes over the ranks, each holding one at a time. The first takes the ends of communication as
numbers: they align the clocks and become arrows. The second writes. The same events give the same
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megascale.telemetry.timeline.alignment import Alignment, align_hosts
from megascale.telemetry.timeline.arrows import Arrows, Counts, draw
from megascale.telemetry.timeline.ends import Collector, Columns
from megascale.telemetry.timeline.groups import Groups
from megascale.telemetry.timeline.rows import Rows
from megascale.telemetry.timeline.selection import Selection
from megascale.telemetry.timeline.source import RankRecord, Source
from megascale.topology import Mesh
from megascale.trace import write_json


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


class _Overview:
    """The first pass: all that has to be known of every rank before one is written."""

    def __init__(self, source: Source, ranks: Sequence[int]) -> None:
        self.streams: set[str] = set()
        self.num_spans = self.num_dropped = 0
        self.first_ns: dict[int, int] = {}
        self._steps: set[int] = set()
        self._ranks = ranks
        self.places = {rank: source.places[rank] for rank in ranks if rank in source.places}
        self._seen: set[int] = set()
        collector = Collector(Groups(source.mesh or Mesh()))
        for record in source.records(ranks):
            self._add(record)
            if source.mesh is not None:
                collector.add(record.rank, record.spans)
        self.ends, self.codes = collector.columns(), collector.codes

    @property
    def missing(self) -> list[int]:
        return sorted(set(self._ranks) - self._seen)

    @property
    def steps(self) -> tuple[int, int] | None:
        return (min(self._steps), max(self._steps)) if self._steps else None

    def _add(self, record: RankRecord) -> None:
        self._seen.add(record.rank)
        self.num_spans += len(record.spans)
        self.num_dropped += record.num_dropped
        self.streams.update(span.stream for span in record.spans)
        self._steps.update(step.step for step in record.steps)
        self._steps.update(span.step for span in record.spans if span.step is not None)
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
    seen = _Overview(source, ranks)
    unaligned = Alignment((), None, "--no-align")
    alignment = align_hosts(seen.ends, seen.places) if align else unaligned
    shift_ns = {
        rank: 0 if place is None else alignment.correction_ns(place.host)
        for rank, place in seen.places.items()
    }
    arrows = draw(_shifted(seen.ends, shift_ns), seen.codes, ranks)
    drawn = Drawn(
        ranks=ranks,
        missing=seen.missing,
        steps=seen.steps,
        num_spans=seen.num_spans,
        num_dropped=seen.num_dropped,
        arrows=arrows.counts,
        alignment=alignment,
    )
    write_json(path, _events(source, ranks, seen, arrows, shift_ns), drawn.as_json())
    return drawn


def _events(
    source: Source,
    ranks: Sequence[int],
    seen: _Overview,
    arrows: Arrows,
    shift_ns: Mapping[int, int],
) -> Iterator[dict[str, Any]]:
    """The second pass; time begins with the first event of all."""
    first_ns = min((t + shift_ns[rank] for rank, t in seen.first_ns.items()), default=0)
    rows = Rows(seen.streams, seen.places, arrows, seen.codes)
    for position, record in enumerate(source.records(ranks)):
        yield from rows.events(record, position, shift_ns[record.rank] - first_ns)


def _shifted(ends: Mapping[str, Columns], shift_ns: Mapping[int, int]) -> dict[str, Columns]:
    """`ends` on one clock."""
    shifts = np.array([shift_ns[rank] for rank in ends["rank"].tolist()], dtype=np.int64)
    times = {name: ends[name] + shifts for name in ("t0_ns", "into_t0_ns")}
    return {**ends, **times}
