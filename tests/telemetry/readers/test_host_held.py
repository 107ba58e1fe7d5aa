"""A run whose host cannot launch fast enough is told from one that runs ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from megascale.events import Step, Sums, run_header
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Window
from megascale.telemetry.store.run import open_run
from megascale.telemetry.writer import LineWriter, line_file
from megascale.topology import Mesh

STEP_NS = 12_000_000


@pytest.mark.parametrize(("launch_ns", "held"), [(11_400_000, True), (8_000_000, False)])
@pytest.mark.parametrize("clock", ["device", "host"])
def test_steps_that_are_as_long_as_their_launch(
    tmp_path: Path, launch_ns: int, held: bool, clock: str
) -> None:
    with LineWriter(line_file(tmp_path, 0)) as writer:
        writer(run_header(Mesh(), 0, host="h0"))
        for step in range(1, 201):
            sums = {"forward": {"total_ns": STEP_NS // 2, "count": 1}}
            writer(Sums(rank=0, step=step, sums=sums))
            writer(
                Step(
                    rank=0,
                    step=step,
                    t0_ns=step * STEP_NS,
                    dur_ns=STEP_NS,
                    clock="device" if clock == "device" else "host",
                    sampled=False,
                    launch_ns=launch_ns,
                )
            )
    with open_run(tmp_path) as run:
        for reader in ("decomposition", "drift"):
            answer = READERS[reader].ask(run, Window())
            is_told = held and clock == "device"
            assert (answer.level == "notice") is is_told
            assert ("in 100.0 % of the steps the host took as long" in answer.summary) is is_told
