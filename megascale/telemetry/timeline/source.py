"""What a timeline is drawn from: the spans, steps and incidents of one rank after the other.

A timeline of all ranks does not fit in memory, those of one rank do. So a source is asked for its
ranks twice: once for how they meet (`ends.py`), once to write them. It gives the same both times.
Times are wall-clock ns here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megascale.errors import DataError
from megascale.events import Dropped, Event, Header, Incident, Span, Step
from megascale.topology import Mesh

Timed = Span | Step | Incident


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    host: str


@dataclass(slots=True)
class RankRecord:
    """One rank's part of a timeline, in the order of time, an outer span before an inner one."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    num_dropped: int = 0

    def sort(self) -> RankRecord:
        self.spans.sort(key=_span_order)
        self.steps.sort(key=lambda step: (step.t0_ns, step.step))
        self.incidents.sort(key=lambda incident: (incident.t_ns, incident.name))
        return self


class Source(Protocol):
    """mesh    None where no header said what it is
    places  of the ranks that are there; None where a rank has no header
    """

    @property
    def mesh(self) -> Mesh | None: ...

    @property
    def places(self) -> Mapping[int, Place | None]: ...

    def records(self, ranks: Sequence[int]) -> Iterator[RankRecord]:
        """Those of `ranks` that are there, in that order."""


class Events:
    """Events in memory, of any number of ranks, each rank's in the order of its file."""

    def __init__(self, events: Iterable[Event]) -> None:
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            by_rank[event.rank].append(event)
        self._records = {rank: record_of(rank, of_rank) for rank, of_rank in by_rank.items()}
        headers = {rank: _newest_header(of_rank) for rank, of_rank in by_rank.items()}
        self.places = {rank: _place(header) for rank, header in headers.items()}
        self.mesh = _mesh(headers.values())
        lost = sorted(
            rank
            for rank, record in self._records.items()
            if headers[rank] is None and (record.spans or record.steps or record.incidents)
        )
        if self.mesh is not None and lost:
            raise DataError(
                f"ranks {lost} have no header, so their times cannot be joined with those of "
                f"ranks {sorted(self.places.keys() - set(lost))}; give the whole files"
            )

    def records(self, ranks: Sequence[int]) -> Iterator[RankRecord]:
        return (self._records[rank] for rank in ranks if rank in self._records)


def record_of(rank: int, events: Iterable[Event]) -> RankRecord:
    """What `events` of one rank, in the order of its file, say."""
    record, offset_ns = RankRecord(rank), 0
    for event in events:
        if isinstance(event, Header):
            offset_ns = event.unix_ns - event.monotonic_ns
        elif isinstance(event, Dropped):
            record.num_dropped = max(record.num_dropped, event.count)
        elif isinstance(event, Timed):
            _add(record, event, offset_ns)
    return record.sort()


def _add(record: RankRecord, event: Timed, offset_ns: int) -> None:
    if isinstance(event, Span):
        record.spans.append(replace(event, t0_ns=event.t0_ns + offset_ns))
    elif isinstance(event, Step):
        record.steps.append(replace(event, t0_ns=event.t0_ns + offset_ns))
    else:
        record.incidents.append(replace(event, t_ns=event.t_ns + offset_ns))


def _newest_header(events: Iterable[Event]) -> Header | None:
    headers = [event for event in events if isinstance(event, Header)]
    return headers[-1] if headers else None


def _place(header: Header | None) -> Place | None:
    if header is None:
        return None
    return Place(header.tp_rank, header.dp_rank, header.pp_rank, header.host)


def _mesh(headers: Iterable[Header | None]) -> Mesh | None:
    """The newest start's: a job may go on with other degrees."""
    known = [header for header in headers if header is not None]
    if not known:
        return None
    newest = max(known, key=lambda header: (header.epoch, header.unix_ns, -header.rank))
    return Mesh(newest.tensor, newest.data, newest.pipeline)


def _span_order(span: Span) -> tuple[int, int, str, str, int, int, str, str]:
    return (
        span.t0_ns,
        -span.dur_ns,
        span.stream,
        span.name,
        -1 if span.seq is None else span.seq,
        -1 if span.micro_batch is None else span.micro_batch,
        span.op or "",
        span.bucket or "",
    )
