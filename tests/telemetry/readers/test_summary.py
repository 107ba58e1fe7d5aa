"""What the summary asks the other readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.telemetry.synthetic import Job, write_segments
from megascale.telemetry.readers import READERS, summary
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.summary import LATE_STEPS
from megascale.telemetry.store.run import Run, open_run
from megascale.topology import Mesh


def test_of_many_ranks_few_steps_with_spans_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_segments(tmp_path, Job(mesh=Mesh(1, 2, 1), num_steps=150, micro_batches=2))
    asked: list[Window] = []

    class Late:
        def ask(self, _run: Run, window: Window) -> Answer:
            asked.append(window)
            return Answer("ok", "nobody", {})

    monkeypatch.setattr(summary, "READERS", {**READERS, "late": Late()})
    with open_run(tmp_path) as run:
        summary.ask(run, Window())
        monkeypatch.setattr(summary, "MANY_RANKS", 2)
        for window in (Window(), Window(last_step=140), Window(first_step=3, last_step=9)):
            summary.ask(run, window)
    found = [(one.first_step, one.last_step) for one in asked]
    many = 10 * LATE_STEPS  # every tenth step of the synthetic run has spans
    assert found == [(None, None), (151 - many, None), (141 - many, 140), (3, 9)]
