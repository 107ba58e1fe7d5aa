"""Who holds a job up, by the records of the others: planted hangs at 8 ranks and at 12,288."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from megascale.events import Ongoing
from megascale.telemetry.diagnose.ongoing import stalled
from megascale.topology import Mesh
from tests.telemetry.diagnose.planted import KINDS, LAYOUTS, SKIPS, Hang, plant
from tests.telemetry.diagnose.planted_large import MEDIUM, NUM_REPLICAS
from tests.telemetry.diagnose.planted_ongoing import enlarged, ongoing

CASES = [
    (layout, kind)
    for layout in LAYOUTS
    for kind in KINDS
    if kind != "unsent" or LAYOUTS[layout].mesh.pipeline > 1
]


def _left_out(hang: Hang) -> str | None:
    """The group of the operation that was left out."""
    (rank,) = hang.guilty
    job = hang.job
    return job.programs[job.stage[rank]][job.fault_at[rank]].group


def _check(layout: str, kind: str, seed: int) -> None:
    hang = plant(LAYOUTS[layout], kind, seed)
    stall = stalled(ongoing(hang), hang.layout.mesh)
    assert stall is not None
    finding = stall.finding
    assert finding.ranks == hang.guilty, (seed, finding)
    assert finding.kind == "hang"
    if kind in SKIPS:
        where = finding.evidence["collective"]
        assert where["group"] == _left_out(hang) or where["seq"] is None, (seed, finding)
    else:
        assert set(finding.evidence["why"].values()) == {"silent"}
        if len(finding.ranks) == 1:  # it is missing where the first of the others waits for it
            assert finding.ranks[0] in finding.evidence["collective"]["missing"], (seed, finding)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [("tp2-pp2-dp2", kind) for kind in KINDS] + [("tp8", "skip"), ("dp8", "skip")],
)
def test_exactly_the_guilty_ranks(layout: str, kind: str) -> None:
    _check(layout, kind, 7)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_exactly_the_guilty_ranks_in_many_seeds(layout: str, kind: str) -> None:
    for seed in range(6):
        _check(layout, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_exactly_the_guilty_ranks_in_all_seeds(layout: str, kind: str) -> None:
    for seed in range(6, 60):
        _check(layout, kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stop", "skip", "unsent", "two asleep"])
def test_twelve_thousand_ranks(kind: str) -> None:
    for seed in range(30):
        hang = plant(MEDIUM, kind, seed)
        mesh, records, guilty = enlarged(hang, NUM_REPLICAS, seed)
        began_s = time.monotonic()
        stall = stalled(records, mesh)
        assert time.monotonic() - began_s < 10
        assert mesh.world_size == 12_288
        assert stall is not None
        assert stall.finding.ranks == guilty, (seed, stall.finding)


# ---------------------------------------------------------------- single rules, by hand


def _record(rank: int, **changes: object) -> Ongoing:
    usual = Ongoing(
        rank=rank,
        t_ns=20_000_000_000,
        waited_ns=10_000_000_000,
        name="tp_all_gather_gemm",
        step=5,
        phase="forward",
        chunk=0,
        micro_batch=1,
        group="tensor",
        seq=9,
        posted={"tensor": 9},
    )
    return replace(usual, **changes)  # type: ignore[arg-type]


def _why(records: dict[int, Ongoing], mesh: Mesh) -> dict[str, str]:
    stall = stalled(records, mesh)
    assert stall is not None
    why: dict[str, str] = stall.finding.evidence["why"]
    return why


def test_nobody_waits() -> None:
    assert stalled({}, Mesh(2, 1, 1)) is None


def test_all_have_come_and_it_does_not_end() -> None:
    stall = stalled({rank: _record(rank) for rank in range(4)}, Mesh(4, 1, 1))
    assert stall is not None
    assert (stall.finding.ranks, stall.finding.certain) == ((), False)
    assert "the transport" in stall.finding.told()
    assert stall.finding.evidence["collective"]["missing"] == []


def test_who_went_on_after_its_record_and_says_nothing_since() -> None:
    """It was only slow at first, then stopped: its record is of a wait that is long over."""
    late = {"t_ns": 60_000_000_000, "seq": 11, "posted": {"tensor": 11}}
    records = {0: _record(0), **{rank: _record(rank, **late) for rank in (1, 2, 3)}}
    assert _why(records, Mesh(4, 1, 1)) == {"0": "went on from tensor 9 and is silent since"}


def test_an_error_of_its_own_is_the_answer() -> None:
    lost = "RuntimeError: Connection closed by peer [127.0.0.1]:4711"
    records = {rank: _record(rank, error=lost) for rank in range(4)}
    records[2] = _record(2, error="OutOfMemoryError: tried to allocate 2 GiB")
    assert _why(records, Mesh(4, 1, 1)) == {
        "2": "failed by itself: OutOfMemoryError: tried to allocate 2 GiB"
    }
    del records[2]
    assert _why(records, Mesh(4, 1, 1)) == {"2": "silent"}


def test_few_records_are_not_certain() -> None:
    stall = stalled({1: _record(1)}, Mesh(4, 1, 1))
    assert stall is not None
    assert (stall.finding.ranks, stall.finding.certain) == ((0, 2, 3), False)


def test_chains_lead_to_their_root() -> None:
    """0 and 1 wait for 2's receive at the end of the step, 3 for its tensor peer 2, which is silent
    with its node's other rank: the pair is covered by their group."""
    sent = {"name": "pp_finish", "group": "pipeline", "seq": None, "phase": "send"}
    posted = {"0->1 activation": 4, "tensor": 9}
    records = {rank: _record(rank, **sent, posted=posted) for rank in (0, 1)}
    stall = stalled(records, Mesh(2, 1, 2))
    assert stall is not None
    assert (stall.finding.ranks, stall.finding.group) == ((2, 3), "tensor")
    records[3] = _record(3, posted={"0->1 activation": 4, "tensor": 10}, seq=10)
    assert _why(records, Mesh(2, 1, 2)) == {"2": "silent"}


def test_one_number_behind_or_ahead() -> None:
    """Of two that both recorded, the one that is past what the other stands in left it out."""
    records = {0: _record(0), 1: _record(1, seq=10, posted={"tensor": 10})}
    assert _why(records, Mesh(2, 1, 1)) == {"1": "skipped tensor 9, where 1 wait"}
