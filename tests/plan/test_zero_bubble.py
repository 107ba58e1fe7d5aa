"""Zero-bubble schedules: the bubble that they promise, and no more memory than without."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.plan.actions import ActionKind, Schedule
from megascale.plan.schedules import build_schedule
from megascale.plan.schedules.transfers import SEND_WINDOW
from megascale.plan.simulate import step_time
from tests.plan.simulate.prices import by_kind

EQUAL = by_kind(1.0, 1.0, 1.0)
BELOW = {"zb_h1": "1f1b", "interleaved_zb": "interleaved_1f1b"}


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Schedule, Schedule]:
    """A zero-bubble schedule and the one below it, of one shape."""
    name = draw(st.sampled_from(sorted(BELOW)))
    stages = draw(st.integers(2, 8))
    chunked = name == "interleaved_zb"
    sizes: dict[str, Any] = {
        "stages": stages,
        "chunks_per_stage": draw(st.integers(2, 4)) if chunked else 1,
        "micro_batches": stages * draw(st.integers(2, 5)),
    }
    split, whole = (build_schedule(n, transfers="decoupled", **sizes) for n in (name, BELOW[name]))
    return split, whole


def _idle(schedule: Schedule, send_window: int = SEND_WINDOW) -> float:
    shape = schedule.shape
    work = 3.0 * shape.micro_batches * shape.chunks_per_stage
    return step_time(schedule, EQUAL, send_window=send_window) - work


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_the_bubble_is_a_third_where_the_halves_are_equal(pair: tuple[Schedule, Schedule]) -> None:
    """Of chunks on 7 and 8 stages a third send wants to leave before the first has met its
    receive: the runtime's window of 2 costs up to 2 computes a step."""
    split, whole = pair
    stages = split.shape.stages
    assert _idle(whole) == 3 * (stages - 1)
    assert _idle(split, send_window=3) == stages - 1
    is_held_up = stages > 6 and split.shape.chunks_per_stage > 1
    assert _idle(split) == stages - 1 + (stages - 6 if is_held_up else 0)


def _kept(schedule: Schedule, stage: int) -> int:
    """Most (chunk, micro-batch) pairs between their forward and the end of their backward."""
    last = ActionKind.BACKWARD_WEIGHT if schedule.splits_backward else ActionKind.BACKWARD
    kept = most = 0
    for action in schedule.actions[stage]:
        kept += int(action.kind is ActionKind.FORWARD) - int(action.kind is last)
        most = max(most, kept)
    return most


@settings(max_examples=60, deadline=None)
@given(pairs())
def test_no_stage_keeps_more_than_the_first_does_below(pair: tuple[Schedule, Schedule]) -> None:
    split, whole = pair
    assert _kept(split, 0) == _kept(whole, 0)
    for stage in range(split.shape.stages):
        assert _kept(split, stage) <= _kept(whole, 0)


@pytest.mark.parametrize("halves", [(1.3, 0.9), (0.9, 1.1)])
def test_unequal_halves_gain_too(halves: tuple[float, float]) -> None:
    cost = by_kind(1.0, *halves)
    sizes: dict[str, Any] = {"stages": 4, "chunks_per_stage": 2, "micro_batches": 16}
    split, whole = (
        step_time(build_schedule(name, transfers="decoupled", **sizes), cost)
        for name in ("interleaved_zb", "interleaved_1f1b")
    )
    ideal = 32 * (1.0 + sum(halves))
    assert split - ideal < 0.5 * (whole - ideal)
