"""What the ranks of a finished run recorded: memory, host time, waits, forms of operators.

Read from the line files of the recorder (`RUN/telemetry`), of every rank: the busiest rank is what
a machine must hold, and not always the first.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.events import Dropped, Event, Header, Incident, Span, Step, Sums, read_events

# Spans in which the compute stream of a stage only waits for its neighbours; the last one is the
# meeting at a shared head.
PIPELINE_WAITS = ("pp_wait", "pp_finish", "world_sums", "head_input")


@dataclass(frozen=True)
class RankRecord:
    """One rank: its header, its steps and the sums of their spans by name, the spans of sampled
    steps, and what it said once: by name of the incident, its details in order."""

    header: Header
    steps: Mapping[int, Step]
    sums: Mapping[int, Mapping[str, Mapping[str, int]]]
    spans: Mapping[int, Sequence[Span]]
    said: Mapping[str, Sequence[Mapping[str, Any]]]
    num_dropped: int = 0

    @property
    def resources(self) -> Mapping[str, Any]:
        return self.said["resources"][-1]

    def host_s(self, step: int) -> float | None:
        """Time in which the host launched `step`, without what it waited for data."""
        launch_ns = self.steps[step].launch_ns
        return None if launch_ns is None else (launch_ns - self.total_ns(step, "data_wait")) / 1e9

    def lead_s(self, step: int) -> float | None:
        """How long before the device's end of `step` the host was done with it; a CPU has none."""
        at = self.steps[step]
        if at.clock != "device" or at.issued_ns is None:
            return None
        return (at.t0_ns + at.dur_ns - at.issued_ns) / 1e9

    def idle_share(self, step: int) -> float:
        """Share of the step in which this stage waited for others."""
        return sum(self.total_ns(step, name) for name in PIPELINE_WAITS) / self.steps[step].dur_ns

    def total_ns(self, step: int, name: str) -> int:
        return self.sums[step].get(name, {}).get("total_ns", 0)


def read_records(telemetry: Path) -> list[RankRecord]:
    """Of every rank, in order; empty where nothing was recorded."""
    return [record_of(read_events(file)) for file in sorted(telemetry.glob("rank_*.jsonl"))]


def record_of(events: Iterable[Event]) -> RankRecord:
    """Of one rank's events, the header first."""
    header: Header | None = None
    steps: dict[int, Step] = {}
    sums: dict[int, Mapping[str, Mapping[str, int]]] = {}
    spans: dict[int, list[Span]] = defaultdict(list)
    said: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    num_dropped = 0
    for event in events:
        if isinstance(event, Header):
            header = event
        elif isinstance(event, Step):
            steps[event.step] = event
        elif isinstance(event, Sums):
            sums[event.step] = event.sums
        elif isinstance(event, Span) and event.step is not None:
            spans[event.step].append(event)
        elif isinstance(event, Incident):
            said[event.name].append(event.detail)
        elif isinstance(event, Dropped):
            num_dropped = event.count
    assert header is not None, "a line file begins with its header"
    return RankRecord(header, steps, sums, dict(spans), dict(said), num_dropped)


def facts(records: Sequence[RankRecord], timed: Sequence[int]) -> dict[str, Any]:
    """Fields of a row; `timed` are the numbers of the steps that count. Empty without records.

    peak_gb    most that any rank's allocator had reserved
    host_ms    time in which a host launched a step, on the rank that took longest
    lead_ms    how far ahead of its device the host was at the end of a step, where it was least; a
               host that is full ahead waits in its launches, so `host_ms` is an upper bound
    forms      of the tensor-parallel operators by problem, where there are any
    """
    if not records:
        return {}
    forms: dict[str, str] = {}
    for record in records:
        forms |= record.resources.get("forms", {})
    found: dict[str, Any] = {
        "peak_gb": max(record.resources["memory_bytes"] for record in records) / 1e9,
        "host_ms": _worst(records, timed, RankRecord.host_s, max),
        "lead_ms": _worst(records, timed, RankRecord.lead_s, min),
    }
    if forms:
        found["forms"] = dict(sorted(forms.items()))
    return {name: value for name, value in found.items() if value is not None}


def roof_tflops(records: Sequence[RankRecord]) -> dict[str, float] | None:
    """TFLOP/s of the roof before and after the steps, each the mean over ranks; None where it was
    not measured."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for detail in record.said.get("roof", ()):
            found[detail["when"]].append(detail["tflops"])
    return {when: statistics.fmean(values) for when, values in found.items()} or None


def _worst(records: Sequence[RankRecord], timed: Sequence[int], read: Any, worst: Any) -> Any:
    """ms: over ranks the worst of the steps' medians; None where it is not known."""
    medians = []
    for record in records:
        values = [read(record, step) for step in timed]
        if None in values or not values:
            return None
        medians.append(statistics.median(values))
    return 1e3 * worst(medians)
