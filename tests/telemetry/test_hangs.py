"""Hangs of real gloo ranks: all others record what they are in, and the guilty one is named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megascale.telemetry.diagnose.ongoing import Stall, stalled
from tests.telemetry.hanging import GROUPS, KINDS, Fault, Hanging, Kind, StuckSave
from tests.train.runs import Layout

LAYOUT: Layout = {"tp": 2, "dp": 2, "pp": 2}
SILENT = ("stop", "gil", "dead", "sleep")


def _of(group: str, fault: Fault) -> bool:
    return "->" in group if fault.group == "pipeline" else group == fault.group


def _check(folder: Path, layout: Layout, fault: Fault) -> Stall:
    with Hanging(folder / "run", layout, fault) as job:
        records = job.records()
    stall = stalled(records, job.mesh)
    assert stall is not None
    told = (fault, stall.finding, stall.meetings, records)
    assert stall.finding.ranks == (fault.rank,), told
    if fault.kind in SILENT:
        assert sorted(records) == [r for r in range(job.mesh.world_size) if r != fault.rank], told
    if fault.kind in ("stop", "gil", "dead"):
        missing = [meeting for meeting in stall.meetings if fault.rank in meeting.missing]
        assert any(_of(meeting.group, fault) for meeting in missing), told
    return stall


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "group", "rank"),
    [
        ("stop", "tensor", 5),
        ("gil", "data", 0),
        ("dead", "pipeline", 3),
        ("skip", "world", 6),
    ],
)
def test_a_hang_in_each_kind_of_group(tmp_path: Path, kind: Kind, group: str, rank: int) -> None:
    _check(tmp_path, LAYOUT, Fault(rank, kind, group))


@pytest.mark.full
def test_a_disk_that_hangs_in_a_save_holds_up_all_others(tmp_path: Path) -> None:
    """Outside of any step, in waits that torch makes and in our own."""
    saving = ("checkpoint.enable=true", "checkpoint.interval=2", "checkpoint.async_mode=off")
    layout: Layout = {"tp": 2, "dp": 2, "pp": 1}
    with Hanging(tmp_path / "run", layout, StuckSave(rank=2), *saving) as job:
        records = job.records()
    stall = stalled(records, job.mesh)
    assert stall is not None
    assert stall.finding.ranks == (2,), (stall.finding, records)
    assert {(r.name, r.phase, r.group) for r in records.values()} == {
        ("agreement", "checkpoint", "world")
    }
    assert stall.finding.evidence["collective"]["missing"] == [2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(30))
def test_thirty_hangs(tmp_path: Path, seed: int) -> None:
    """Every kind of fault at every kind of group, at eight ranks in four layouts."""
    rng = random.Random(seed)
    group, kind = GROUPS[seed % len(GROUPS)], KINDS[seed // len(GROUPS) % len(KINDS)]
    layouts: list[Layout] = [LAYOUT, {"tp": 4, "dp": 2, "pp": 1}, {"tp": 1, "dp": 4, "pp": 2}]
    degree = {"world": "tp", "tensor": "tp", "data": "dp", "pipeline": "pp"}[group]
    fitting = [one for one in layouts if one[degree] > 1 or group == "world"]
    fault = Fault(rng.randrange(8), kind, group, step=rng.randrange(2, 5))
    _check(tmp_path, rng.choice(fitting), fault)
