"""The steps of a run's store as the source of a timeline: some ranks at a time, out of Parquet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from megascale.events import Incident, Span, Step
from megascale.telemetry.store.run import Run
from megascale.telemetry.timeline.alignment import Alignment, align_hosts
from megascale.telemetry.timeline.ends import Collector
from megascale.telemetry.timeline.groups import Groups
from megascale.telemetry.timeline.source import Place, RankRecord
from megascale.topology import Mesh

_RANKS_A_QUERY = 64


class StoredRun:
    """Steps `first` to `last` of `run`. What is outside of steps (the assembly, checkpoints) is not
    part of it."""

    def __init__(self, run: Run, first: int, last: int) -> None:
        self._run, self._first, self._last = run, first, last
        places = run.places
        self._places = {
            int(rank): Place(int(tp), int(dp), int(pp), host)
            for rank, tp, dp, pp, host in zip(
                places.rank_R, places.tp_R, places.dp_R, places.pp_R, places.host_R, strict=True
            )
        }
        self._incidents = self._incidents_by_rank()
        rows = run.query("SELECT rank, sum(count) AS count FROM dropped GROUP BY rank").to_pylist()
        self._dropped = {row["rank"]: int(row["count"]) for row in rows}

    @property
    def mesh(self) -> Mesh:
        return self._run.mesh

    @property
    def places(self) -> Mapping[int, Place]:
        return self._places

    def records(self, ranks: Sequence[int]) -> Iterator[RankRecord]:
        there = [rank for rank in ranks if rank in self._places]
        for begin in range(0, len(there), _RANKS_A_QUERY):
            some = there[begin : begin + _RANKS_A_QUERY]
            spans: dict[int, list[Span]] = defaultdict(list)
            for span in self._run.spans(self._first, self._last, ranks=some):
                spans[span.rank].append(span)
            steps = self._steps(some)
            for rank in some:
                record = RankRecord(rank, spans[rank], steps[rank], self._incidents[rank])
                record.num_dropped = self._dropped.get(rank, 0)
                yield record.sort()

    def _steps(self, ranks: Sequence[int]) -> dict[int, list[Step]]:
        rows = self._run.query(
            "SELECT rank, step, t0_ns, dur_ns, clock, sampled FROM current_steps "
            "WHERE step BETWEEN ? AND ? AND rank IN (SELECT unnest(?::INTEGER[]))",
            (self._first, self._last, list(ranks)),
        ).to_pylist()
        steps: dict[int, list[Step]] = defaultdict(list)
        for row in rows:
            steps[row["rank"]].append(Step(**row))
        return steps

    def _incidents_by_rank(self) -> dict[int, list[Incident]]:
        found: dict[int, list[Incident]] = defaultdict(list)
        for _, incident in self._run.incidents():
            if incident.step is not None and self._first <= incident.step <= self._last:
                found[incident.rank].append(incident)
        return found


def clocks_of(run: Run, first: int, last: int) -> Alignment:
    """How far the clocks of the hosts of `run` are apart in these steps, for whoever compares times
    of several hosts: add `correction_ns(host)` to those of `Run.spans`."""
    source, collector = StoredRun(run, first, last), Collector(Groups(run.mesh))
    for record in source.records(sorted(source.places)):
        collector.add(record.rank, record.spans)
    return align_hosts(collector.columns(), source.places)
