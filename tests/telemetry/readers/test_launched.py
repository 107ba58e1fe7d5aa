"""Launches out of the store, against every span of the run taken one by one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.telemetry.faults import GarbageGrowth
from benchmarks.telemetry.synthetic import Job, write_segments
from megascale.events import Span
from megascale.telemetry.readers.launched import launched
from megascale.telemetry.standing import WAITS
from megascale.telemetry.store.run import Run, open_run
from megascale.topology import Mesh

STEPS = range(5, 60, 5)
Launch = tuple[int, int, int, str, int, int, int]  # rank, step, seq, kind, own, gap, garbage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched") / "run"
    often = GarbageGrowth(per_step=0.01, chance=0.7)
    job = Job(mesh=Mesh(2, 2, 2), num_steps=60, micro_batches=8, span_steps=STEPS, faults=[often])
    write_segments(folder, job)
    return folder


def _is_wait(span: Span) -> bool:
    in_tensor = span.name.startswith("tp_") and span.group is not None
    return (span.name, span.op) in WAITS or in_tensor


def _one_by_one(spans: list[Span], group: str) -> set[Launch]:
    of_step: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in spans:
        assert span.step is not None
        of_step[span.rank, span.step].append(span)
    found = set[Launch]()
    for (rank, step), those in of_step.items():
        garbage_ns = 0
        for span in those:
            if span.name in ("gc", "gc_pause"):
                garbage_ns += span.dur_ns
            if span.group != group or span.seq is None:
                continue
            before = [one for one in those if one.t0_ns < span.t0_ns]
            waits = [one.t0_ns + one.dur_ns for one in before if _is_wait(one)]
            busy = [one.t0_ns + one.dur_ns for one in before if one.name not in ("gc", "gc_pause")]
            if waits and max(waits) <= span.t0_ns:
                own, gap = span.t0_ns - max(waits), max(0, span.t0_ns - max(busy))
                kind = f"{span.name} {span.op or ''}".strip()
                found.add((rank, step, span.seq, kind, own, gap, garbage_ns))
                garbage_ns = 0
    return found


@pytest.mark.parametrize("group", ["data", "tensor", "world"])
def test_what_lies_before_each_launch(folder: Path, group: str) -> None:
    with open_run(folder) as run:
        spans = [one for one in run.spans(1, 60) if one.step is not None]
        expected = _one_by_one(spans, group)
        found = launched(run, 1, 60, group)
    assert any(span.name in ("gc", "gc_pause") for span in spans)
    columns = found.rank_L, found.step_L, found.kind_L, found.own_L, found.gap_L, found.garbage_L
    got = {
        (rank, step, found.kinds[kind], own, gap, garbage)
        for rank, step, kind, own, gap, garbage in zip(
            *(column.astype(int).tolist() for column in columns), strict=True
        )
    }
    assert got == {(*launch[:2], *launch[3:]) for launch in expected}
    assert len(found.rank_L) == len(expected)
    meetings = defaultdict(set)
    for rank, meeting in zip(found.rank_L.tolist(), found.meeting_L.tolist(), strict=True):
        meetings[meeting].add(rank)
    assert {len(ranks) for ranks in meetings.values()} == {8 if group == "world" else 2}


def test_little_of_a_step_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, query = [], Run.query

    def counting(run: Run, *asked: Any) -> Any:
        found = query(run, *asked)
        num_rows.append(found.num_rows)
        return found

    monkeypatch.setattr(Run, "query", counting)
    with open_run(folder) as run:
        launched(run, 1, 60, "data")
        (num_spans,) = run.query("SELECT count(*) AS n FROM current_spans")["n"].to_pylist()
    assert sum(num_rows[:-1]) < num_spans / 8
