"""A fault is planted in a synthetic run, and the reader whose question it is names exactly the
guilty; of a clean run no reader has anything to say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.telemetry.faults import (
    Congestion,
    Drift,
    Fault,
    GarbageGrowth,
    LateLauncher,
    LossSpike,
    MemoryPressure,
    Restart,
    SlowHost,
    SlowRank,
)
from benchmarks.telemetry.synthetic import Job, write_segments
from megascale.errors import DataError
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Answer, Window
from megascale.telemetry.store.run import open_run
from megascale.topology import Mesh

OF_ONE_RUN = [name for name in READERS if name != "compare"]
MESH = Mesh(2, 4, 2)
Ask = Callable[..., Answer]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """`ask(reader, fault, ..., mesh=, steps=, options=)` of a run made for it."""
    base = tmp_path_factory.mktemp("runs")
    made: dict[object, Path] = {}

    def of(
        reader: str,
        *faults: Fault,
        mesh: Mesh = MESH,
        steps: int = 90,
        window: Window | None = None,
        **job: object,
    ) -> Answer:
        key = (faults, mesh, steps, *job.items())
        if key not in made:
            made[key] = base / f"run{len(made)}"
            whole = Job(mesh=mesh, num_steps=steps, faults=faults, micro_batches=4, **job)  # type: ignore[arg-type]
            write_segments(made[key], whole)
        with open_run(made[key], catch_up=False) as run:
            answer = READERS[reader].ask(run, window or Window())
        json.dumps(answer.as_json(), allow_nan=False)
        return answer

    return of


@pytest.mark.full
@pytest.mark.parametrize("reader", OF_ONE_RUN)
def test_a_clean_run(ask: Ask, reader: str) -> None:
    answer = ask(reader)
    assert answer.level == "ok", answer.summary
    assert answer.summary
    assert all(len(line) <= 100 for line in answer.lines if "  " in line), answer.lines


@pytest.mark.full
def test_a_slow_rank(ask: Ask) -> None:
    fault = SlowRank(rank=5, share=0.10)
    answer = ask("stragglers", fault)
    assert (answer.level, answer.data["ranks"]) == ("alert", [5])
    assert answer.data["share"][0] == pytest.approx(0.10, abs=0.02)
    assert answer.summary.startswith("rank 5 on host node-0000 computes ")
    outliers = [o for o in ask("heat_map", fault).data["outliers"] if not o["waits"]]
    assert [(o["dimension"], o["value"], o["phase"]) for o in outliers] == [
        ("rank", "5", "compute")
    ]
    estimate = ask("what_if", fault).data
    assert estimate["ranks"] == [5]
    assert estimate["saved_share"] == pytest.approx(0.05, abs=0.02)
    found = ask("summary", fault).data["findings"]
    assert [one["reader"] for one in found] == ["stragglers", "heat_map"]


@pytest.mark.full
def test_a_slow_host(ask: Ask) -> None:
    fault, mesh = SlowHost(host=2, share=0.10), Mesh(2, 16, 1)
    answer = ask("stragglers", fault, mesh=mesh)
    assert answer.data["ranks"] == list(range(16, 24))
    assert "all ranks of host node-0002" in answer.summary
    assert ask("heat_map", fault, mesh=mesh).summary.startswith("host node-0002 takes ")


@pytest.mark.full
def test_stragglers_of_few_steps_say_what_they_need(ask: Ask) -> None:
    answer = ask("stragglers", SlowRank(rank=5), steps=8)
    assert answer.level == "ok"
    assert any("1 window of 5; 3 are needed" in text for text in answer.caveats)


@pytest.mark.full
def test_a_phase_that_grows(ask: Ask) -> None:
    answer = ask("drift", Drift("optimizer", 0.05, from_step=60), steps=120)
    assert [one["phase"] for one in answer.data["grown"]] == ["optimizer"]
    assert answer.data["grown"][0]["since_step"] == pytest.approx(62, abs=6)
    assert answer.data["grown"][0]["after_ms"] > 2 * answer.data["grown"][0]["before_ms"]


@pytest.mark.full
def test_garbage_collections_that_grow(ask: Ask) -> None:
    """MegaScale 6.3: what waits for gradients grows, ranks launch apart, nobody alone is late."""
    answer = ask("drift", GarbageGrowth(0.004, 0.5, from_step=40), mesh=Mesh(1, 8, 1), steps=200)
    own = [one["phase"] for one in answer.data["grown"] if not one["waits"]]
    assert (answer.level, own) == ("alert", ["gc"])
    assert answer.data["late_ranks"] == []
    assert answer.data["launch_offset_after_ms"] > 3 * answer.data["launch_offset_before_ms"]
    assert "others in every step" in answer.summary


@pytest.mark.full
def test_a_rank_that_launches_later_and_later(ask: Ask) -> None:
    answer = ask("drift", LateLauncher(6, 0.2, from_step=50), mesh=Mesh(1, 8, 1), steps=100)
    assert answer.data["late_ranks"] == [6]
    assert "rank 6 on host node-0000 later than the others" in answer.summary
    assert ask("stragglers", LateLauncher(6, 0.2), mesh=Mesh(1, 8, 1)).level == "ok"


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "chunks", "alone"), [("1f1b", 1, 1 / 4), ("interleaved_1f1b", 2, 1 / 8)]
)
def test_bubbles_are_the_schedule_s(ask: Ask, schedule: str, chunks: int, alone: float) -> None:
    answer = ask("bubbles", schedule=schedule, chunks_per_stage=chunks)
    assert answer.data["predicted_share"] == pytest.approx(alone)
    assert answer.data["bubble_share"] == pytest.approx(alone, abs=0.04)


@pytest.mark.full
def test_a_stage_that_is_slower(ask: Ask) -> None:
    """All of stage 1: no straggler among its peers, but the pipeline waits for it."""
    slow = [SlowRank(rank, 0.3) for rank in range(8, 16)]
    answer = ask("bubbles", *slow)
    assert answer.level == "notice"
    assert answer.data["imbalance_share"] == pytest.approx(0.13, abs=0.03)
    assert "stage 1 computes" in answer.summary
    assert ask("stragglers", *slow).level == "ok"


@pytest.mark.full
def test_a_slow_network(ask: Ask) -> None:
    """Congestion of a host slows the data groups that it is in."""
    fault, mesh = Congestion(host=3, factor=4.0), Mesh(1, 16, 4)
    answer = ask("communication", fault, mesh=mesh)
    operation = next(o for o in answer.data["operations"] if o["op"] == "reduce_scatter")
    assert [slow["ranks"] for slow in operation["slow"]] == [list(range(16, 32))]
    assert operation["slow"][0]["times"] == pytest.approx(4.0, rel=0.05)
    assert answer.data["link_bytes_per_s"] == 50e9
    assert operation["bytes_per_s"] == pytest.approx(2**30 / 0.05, rel=0.02)


def test_a_loss_that_jumps(ask: Ask) -> None:
    answer = ask("loss", LossSpike(step=60, num_steps=5))
    assert answer.level == "alert"
    spikes = answer.data["spikes"]
    assert [(one["first_step"], one["last_step"]) for one in spikes["loss"]] == [(60, 64)]
    assert [(one["first_step"], one["last_step"]) for one in spikes["grad_norm"]] == [(60, 64)]


@pytest.mark.full
def test_restarts(ask: Ask) -> None:
    faults = Restart(60, 40, pause_s=100.0), Restart(80, 70, pause_s=50.0)
    answer = ask("restarts", *faults)
    assert [one["replayed"] for one in answer.data["restarts"]] == [(41, 60), (71, 80)]
    assert [one["at_step"] for one in answer.data["restarts"]] == [60, 80]
    # and 5 s until the first step
    assert [one["down_s"] for one in answer.data["restarts"]] == pytest.approx([105, 55], abs=1)
    assert [start["first_step"] for start in answer.data["starts"]] == [1, 41, 71]
    assert answer.level == "notice"


@pytest.mark.full
def test_memory_pressure(ask: Ask) -> None:
    answer = ask("memory", MemoryPressure(host=1))
    assert answer.level == "alert"
    assert [one["rank"] for one in answer.data["out_of_memory"]] == [8]
    pressed = [
        rank
        for rank, retries in zip(
            answer.data["ranks"], answer.data["rank_alloc_retries"], strict=True
        )
        if retries
    ]
    assert pressed == list(range(8, 16))
    assert "host node-0001" in answer.summary


@pytest.mark.full
def test_two_runs_and_the_host_between_them(tmp_path: Path) -> None:
    mesh = Mesh(2, 16, 1)
    for name, faults, seed in (("good", (), 1), ("bad", (SlowHost(2, 0.1),), 2)):
        write_segments(tmp_path / name, Job(mesh=mesh, num_steps=60, faults=faults, seed=seed))
    window = Window(options={"with": str(tmp_path / "bad")})
    with open_run(tmp_path / "good") as run:
        answer = READERS["compare"].ask(run, window)
        with pytest.raises(DataError, match="compare needs other runs"):
            READERS["compare"].ask(run, Window())
    assert answer.data["hosts"] == ["node-0002"]
    assert answer.summary.startswith("bad is ")
    assert len(answer.data["runs"]) == 2


@pytest.mark.full
def test_ranks_that_are_not_there(ask: Ask) -> None:
    with pytest.raises(DataError, match=r"ranks .99. were asked for; recorded are 0 to 15"):
        ask("heat_map", window=Window(ranks=[99]))
    answer = ask("heat_map", window=Window(ranks=[3, 4]))
    assert answer.data["ranks"] == [3, 4]
