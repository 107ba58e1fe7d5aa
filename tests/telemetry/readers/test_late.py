"""The reader of late launchers on synthetic runs with known truth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.telemetry.faults import Fault, GarbageGrowth, LateLauncher, SlowRank
from benchmarks.telemetry.synthetic import Job, write_segments
from megascale.errors import DataError
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.readers.late import stand_out
from megascale.telemetry.readers.launched import Launches
from megascale.telemetry.store.run import open_run
from megascale.topology import Mesh


def _ask(
    folder: Path, mesh: Mesh, faults: Sequence[Fault], num_steps: int = 120, **options: str
) -> Answer:
    job = Job(mesh=mesh, num_steps=num_steps, faults=faults, span_steps=range(5, num_steps, 5))
    write_segments(folder / "run", job)
    with open_run(folder / "run") as run:
        answer = READERS["late"].ask(run, Window(options=options))
    json.dumps(answer.as_json(), allow_nan=False)
    return answer


@pytest.mark.parametrize("mesh", [Mesh(2, 4, 1), Mesh(2, 2, 2)])
def test_the_late_launcher_and_not_those_that_wait(tmp_path: Path, mesh: Mesh) -> None:
    answer = _ask(tmp_path, mesh, [LateLauncher(5)])
    assert (answer.level, answer.data["ranks"]) == ("alert", [5])
    assert answer.data["causes"] == ["launches late"]
    assert answer.data["late_ms"][0] == pytest.approx(50, rel=0.2)
    assert "rank 5 on node-0000 launches grad_sync reduce_scatter" in answer.summary
    assert "the host is late" in answer.summary


def test_without_tensor_groups_it_stands_out_of_the_noise(tmp_path: Path) -> None:
    """Then the own time before the reduction is the whole step's computation."""
    answer = _ask(tmp_path, Mesh(1, 8, 1), [LateLauncher(2)])
    assert answer.data["ranks"] == [2]


def test_a_slow_rank_is_not_called_late(tmp_path: Path) -> None:
    answer = _ask(tmp_path, Mesh(1, 8, 1), [SlowRank(6, 0.1)])
    assert (answer.data["ranks"], answer.data["slow_ranks"]) == ([], [6])
    assert answer.level == "notice"
    assert "rank 6 computes slower (ask stragglers)" in answer.summary


def test_garbage_collection_by_ranks_in_turns(tmp_path: Path) -> None:
    """Whether one of them stands out or none: what their collectives lose grows, by its cause."""
    often = GarbageGrowth(per_step=0.01, chance=0.7)
    answer = _ask(tmp_path, Mesh(4, 2, 1), [often], 400)
    assert answer.level != "ok"
    assert set(answer.data["causes"]) <= {"garbage collection"}
    assert answer.data["lost_grows"]
    assert answer.summary.endswith("by ranks in turns; cause: garbage collection")


def test_garbage_collection_of_one_rank_is_its_cause() -> None:
    rank_L, meeting_L = np.tile(np.arange(4), 20), np.repeat(np.arange(20), 4)
    pause_L = np.where(rank_L == 2, 30e6, 0.0)
    launches = Launches(
        rank_L=rank_L,
        meeting_L=meeting_L,
        step_L=meeting_L,
        kind_L=np.zeros(80, np.int64),
        own_L=100e6 + pause_L,
        gap_L=pause_L,
        garbage_L=pause_L,
        kinds=("grad_sync reduce_scatter",),
    )
    (late,), _ = stand_out(launches)
    assert (late.rank, late.cause, late.late_s) == (2, "garbage collection", 0.03)


def test_nobody_is_late(tmp_path: Path) -> None:
    answer = _ask(tmp_path, Mesh(2, 4, 1), [])
    assert (answer.level, answer.data["ranks"]) == ("ok", [])


def test_too_few_launches_are_said(tmp_path: Path) -> None:
    answer = _ask(tmp_path, Mesh(1, 4, 1), [LateLauncher(2)], 16)
    assert answer.data["ranks"] == []
    assert any("are needed to call a rank late" in caveat for caveat in answer.caveats)


def test_a_group_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="option group is 'rows'; legal: tensor, data"):
        _ask(tmp_path, Mesh(1, 2, 1), [], 12, group="rows")
