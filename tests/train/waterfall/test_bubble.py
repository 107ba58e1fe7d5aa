"""What a schedule leaves idle, against its formulas and by hand."""

from __future__ import annotations

import pytest

from megascale.plan.actions import COMPUTES, PipelineShape
from megascale.plan.schedules import build_stage
from megascale.train.waterfall.bubble import SPAN_OF, Compute, idle_ns


def _durations(schedule: str, shape: PipelineShape, **ns: int) -> dict[Compute, int]:
    return {
        (SPAN_OF[a.kind], a.chunk, a.micro_batch): ns[SPAN_OF[a.kind]]
        for stage in range(shape.stages)
        for a in build_stage(schedule, shape, stage)
        if a.kind in COMPUTES
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_stages_are_idle_for_p_minus_1_micro_batches(schedule: str, stages: int) -> None:
    shape = PipelineShape(stages, 1, 8)
    durations = _durations(schedule, shape, forward=10, backward=20)
    assert idle_ns(schedule, shape, durations) == (30 * (stages - 1),) * stages


@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_divides_it_by_the_chunks_of_a_stage(chunks: int) -> None:
    shape = PipelineShape(4, chunks, 8)
    durations = _durations("interleaved_1f1b", shape, forward=10, backward=20)
    assert idle_ns("interleaved_1f1b", shape, durations) == (30 * 3,) * 4  # of chunks, not stages


def test_backward_in_halves_leaves_less() -> None:
    shape = PipelineShape(4, 1, 8)
    whole = idle_ns("1f1b", shape, _durations("1f1b", shape, forward=10, backward=20))
    halves = _durations("zb_h1", shape, forward=10, backward_input=10, backward_weight=10)
    assert max(idle_ns("zb_h1", shape, halves)) < min(whole)


def test_joined_weight_gradients_keep_no_neighbour_waiting() -> None:
    """Of four micro-batches one computes the weights' halves of all, behind its gradient's send."""
    shape, burst = PipelineShape(4, 1, 8), 4 * 10
    each = _durations("zb_h1", shape, forward=10, backward_input=10, backward_weight=0)
    halves: dict[Compute, int] = {key: ns for key, ns in each.items() if ns}
    halves |= {("backward_weight", stage, m): burst for stage in range(4) for m in (3, 7)}
    whole: dict[Compute, int] = {}
    for (name, stage, m), ns in halves.items():
        key = ("forward" if name == "forward" else "backward", stage, m)
        whole[key] = whole.get(key, 0) + ns
    idle, idle_whole = idle_ns("1f1b", shape, halves), idle_ns("1f1b", shape, whole)
    assert idle == (3 * 20,) * 4, "a forward and an input's half of each other stage"
    assert min(idle_whole) == 3 * (20 + 2 * burst), "which else wait for the bursts too"


def test_a_slow_stage_makes_the_others_wait() -> None:
    shape = PipelineShape(2, 1, 4)
    durations = _durations("1f1b", shape, forward=10, backward=20)
    slow = {key: 2 * ns if key[1] == 1 else ns for key, ns in durations.items()}
    first, last = idle_ns("1f1b", shape, slow)
    assert last == 30, "the first forward and the last backward of the other"
    assert first == 30 + 4 * 30, "and what it computes less"


def test_a_shared_head_is_a_meeting_of_all_stages() -> None:
    shape = PipelineShape(2, 2, 8)
    name = "interleaved_1f1b"
    durations = _durations(name, shape, forward=10, backward=20)
    heads = {("head", stage, m): 6 for stage in (0, 1) for m in range(8)}
    without = idle_ns(name, shape, durations)
    met = idle_ns(name, shape, durations | heads, shared_head=True)
    assert max(met) < 2 * max(without), "nobody waits long at a meeting"
    late = idle_ns(name, shape, durations | {**heads, ("head", 1, 3): 66}, shared_head=True)
    assert late[0] >= met[0] + 50, "the other stage waits for the one that is late"
