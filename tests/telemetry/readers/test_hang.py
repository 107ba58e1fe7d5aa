"""The hang reader on run folders as ranks leave them: line files with steps and ongoing events."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megascale.events import Ongoing, Step, run_header
from megascale.telemetry.diagnose.ongoing import stalled
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.store.run import open_run
from megascale.telemetry.writer import LineWriter, line_file
from megascale.topology import Mesh
from tests.telemetry.diagnose.planted import LAYOUTS, plant
from tests.telemetry.diagnose.planted_ongoing import ongoing


def _write(
    folder: Path, mesh: Mesh, records: Mapping[int, Ongoing], last_step: Mapping[int, int]
) -> None:
    """Line files of a run in which each rank finished one step, and some recorded."""
    for rank in range(mesh.world_size):
        with LineWriter(line_file(folder, rank), rank=rank) as writer:
            header = run_header(mesh, rank, host=f"h{rank // 4}")
            writer(header)
            if rank in records:
                writer(records[rank])
            if rank in last_step:
                now_ns = header.monotonic_ns
                step = last_step[rank]
                writer(
                    Step(rank=rank, step=step, t0_ns=now_ns, dur_ns=9, clock="host", sampled=False)
                )


def _ask(folder: Path) -> Answer:
    with open_run(folder) as run:
        answer = READERS["hang"].ask(run, Window())
    json.dumps(answer.as_json(), allow_nan=False)
    return answer


@pytest.mark.parametrize(("kind", "seed"), [("stop", 1), ("skip", 4), ("unsent", 2)])
def test_a_planted_hang(tmp_path: Path, kind: str, seed: int) -> None:
    hang = plant(LAYOUTS["tp2-pp2-dp2"], kind, seed)
    records, mesh = ongoing(hang), hang.layout.mesh
    before = {rank: hang.job.ranks[rank].step - 1 for rank in range(8)}
    _write(tmp_path, mesh, records, before)
    answer, stall = _ask(tmp_path), stalled(records, mesh)
    assert stall is not None
    (guilty,) = hang.guilty
    assert answer.level == "alert"
    assert f"rank {guilty} on h{guilty // 4}" in answer.summary
    assert answer.data["suspects"] == [guilty]
    states = [answer.data["states"][number] for number in answer.data["state"]]
    silent = [rank for rank in range(8) if rank not in records]
    assert states == ["silent" if rank in silent else "waiting" for rank in range(8)]
    for rank, record in records.items():
        told = answer.data["waits"][answer.data["wait"][rank]]
        assert (told["name"], told["group"]) == (record.name, record.group)
        assert answer.data["seq"][rank] == record.seq
    assert answer.data["collective"] == stall.finding.evidence["collective"]
    assert answer.lines[0].split() == ["operation", "came", "of", "waiting", "missing"]


def _record(rank: int, step: int, error: str | None = None) -> Ongoing:
    return Ongoing(
        rank=rank,
        t_ns=time.monotonic_ns(),
        waited_ns=10_000_000_000,
        name="world_sums",
        op="wait",
        step=step,
        group="world",
        seq=step,
        posted={"world": step},
        error=error,
    )


def test_a_wait_that_is_over_is_none(tmp_path: Path) -> None:
    """A slow step: everybody recorded and went on, but for one whose last lines are lost."""
    records = {rank: _record(rank, 5) for rank in range(4)}
    _write(tmp_path, Mesh(1, 4, 1), records, {0: 5, 1: 7, 2: 5})
    answer = _ask(tmp_path)
    assert (answer.level, answer.data["suspects"]) == ("ok", [])
    assert answer.summary == "no rank waits beyond its deadline; the last step is 7"


def test_errors_and_young_records(tmp_path: Path) -> None:
    records = {rank: _record(rank, 5, "RuntimeError: Connection reset by peer") for rank in (0, 1)}
    _write(tmp_path, Mesh(1, 3, 1), records, {0: 5, 1: 5, 2: 4})  # an error ends its step
    answer = _ask(tmp_path)
    assert answer.data["suspects"] == [2]
    assert answer.data["errors"]["1"] == "RuntimeError: Connection reset by peer"
    assert any("may still be about to record" in caveat for caveat in answer.caveats)


def test_nothing_is_wrong(tmp_path: Path) -> None:
    _write(tmp_path, Mesh(1, 2, 1), {}, {})
    assert _ask(tmp_path).summary == (
        "no rank waits beyond its deadline; no rank has finished a step"
    )
