"""The bubble at 1x and 4x the batch, from runs that were never made."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.events import Event, Step, Sums, run_header
from megascale.topology import Mesh
from megascale.train.bench.bubble import bubble_cases, measure_bubble, summary
from megascale.train.bench.case import Case
from megascale.train.bench.measure import Run
from megascale.train.bench.records import record_of
from megascale.train.bench.rows import Origin, Row
from tests.train.bench.planted import PP2, planted_record, planted_run, write_tiny


def test_what_a_larger_batch_saves_beside_what_the_paper_claims(tmp_path: Path) -> None:
    cases = bubble_cases(write_tiny(tmp_path), [PP2], 2, model=None, num_gpus=0)
    assert [case.keys["gbs"] for case in cases] == [4, 16]
    order: list[int] = []

    def measure(case: Case) -> Run:
        """A fifth of each step is waiting; the larger batch takes twice the time."""
        order.append(case.keys["gbs"])
        step_s = 0.1 if case.keys["gbs"] == 4 else 0.2
        run = planted_run(case, step_s=step_s)
        records = [
            planted_record(rank, len(run.steps), step_s, mesh=Mesh(pipeline=2)) for rank in (0, 1)
        ]
        return Run(run.steps, records)

    written: list[Row] = []
    rows = measure_bubble(
        cases, 2, Origin({"dirty": True}, on_gpus=False), measure=measure, write=written.append
    )
    assert order == [4, 16, 4, 16]
    assert written == rows
    once, fourfold = rows
    assert once["value"] == pytest.approx(0.2)
    assert once["stages"] == pytest.approx([0.2, 0.2])
    assert once["formula"] == pytest.approx((1 / 4) / (1 + 1 / 4))
    assert fourfold["formula"] == pytest.approx((1 / 16) / (1 + 1 / 16))
    assert fourfold["saved"] == pytest.approx(1 - 0.04 / (4 * 0.02))
    assert fourfold["paper_claim"] == 0.875
    assert once["case"]["schedule"] == "1f1b"
    assert "is idle 50.0 % less than 4 steps at 1x; MegaScale 3.1 claims 87.5 %" in summary(rows)


def test_waiting_at_a_shared_head_is_idle_too() -> None:
    """A stage that is early at the meeting waits in its broadcast, and not for a receive."""
    waits = {"pp_wait": 100, "head_input": 250, "head": 400, "forward": 300}
    sums = {name: {"total_ns": ns, "count": 1} for name, ns in waits.items()}
    events: list[Event] = [
        run_header(Mesh(pipeline=2), 0, host="here"),
        Sums(rank=0, step=4, sums=sums),
        Step(rank=0, step=4, t0_ns=0, dur_ns=1000, clock="device", sampled=True),
    ]
    assert record_of(events).idle_share(4) == pytest.approx(0.35)
