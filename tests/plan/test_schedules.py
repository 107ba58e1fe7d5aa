"""Generated schedules: every size is proved, bounds are tight, snapshots do not move."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.plan.actions import (
    COMPUTES,
    INPUT_GRADIENTS,
    RECEIVES,
    Action,
    ActionKind,
    PipelineShape,
    Schedule,
)
from megascale.plan.check import check_schedule
from megascale.plan.schedules import SCHEDULES, TRANSFERS, build_schedule, build_stage
from megascale.plan.schedules.shared_head import MOST_STAGES
from megascale.plan.schedules.transfers import receives_for, sends_of
from megascale.plan.simulate import step_time

GOLDEN = Path(__file__).parent / "golden"
SNAPSHOTS = [
    ("gpipe", 2, 1, 3, "decoupled"),
    ("1f1b", 4, 1, 6, "decoupled"),
    ("1f1b", 4, 1, 6, "coupled"),
    ("interleaved_1f1b", 3, 2, 6, "decoupled"),
    ("interleaved_1f1b", 3, 2, 6, "coupled"),
    ("zb_h1", 3, 1, 6, "decoupled"),
    ("zb_h1", 3, 1, 6, "coupled"),
    ("interleaved_zb", 2, 2, 4, "decoupled"),
    ("forward_only", 2, 2, 3, "decoupled"),
]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.integers(1, 9))
    interleaved = name.startswith("interleaved")
    chunked = stages > 1 and (interleaved or name == "forward_only")
    chunks_per_stage = draw(st.integers(1, 5)) if chunked else 1
    if interleaved:
        micro_batches = stages * draw(st.integers(1, 4))
    else:
        micro_batches = draw(st.integers(1 if name == "forward_only" else stages, 3 * stages + 2))
    can_share = SCHEDULES[name].can_share_head and 1 < stages <= MOST_STAGES
    shared_head = can_share and draw(st.booleans())
    return build_schedule(
        name,
        stages=stages,
        chunks_per_stage=chunks_per_stage,
        micro_batches=micro_batches,
        transfers="decoupled" if shared_head else draw(st.sampled_from(sorted(TRANSFERS))),
        shared_head=shared_head,
        split_backward=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_schedule_is_proved_and_its_bounds_are_tight(schedule: Schedule) -> None:
    bounds = check_schedule(schedule)
    assert tuple(b.in_flight for b in bounds) == schedule.in_flight_limits
    assert tuple(b.deferred for b in bounds) == schedule.deferred_limits
    assert all(b.communicators <= 4 for b in bounds)


@pytest.mark.parametrize(("name", "p", "v", "m", "transfers"), SNAPSHOTS)
def test_snapshot(name: str, p: int, v: int, m: int, transfers: str) -> None:
    """A changed schedule is a decision: look at it, then delete the file and run again."""
    schedule = build_schedule(
        name, stages=p, chunks_per_stage=v, micro_batches=m, transfers=transfers
    )
    path = GOLDEN / f"{name}_p{p}_v{v}_m{m}_{transfers}.txt"
    if not path.exists():
        path.write_text(schedule.render())
        pytest.fail(f"{path.name} was missing and has been written; read it and run again")
    assert schedule.render() == path.read_text()


def _computes(name: str, p: int, v: int, m: int, stage: int) -> str:
    actions = build_stage(name, PipelineShape(p, v, m), stage)
    return " ".join(str(a) for a in actions if a.peer_stage is None)


def test_orders_by_hand() -> None:
    assert _computes("1f1b", 3, 1, 4, 0) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert _computes("1f1b", 3, 1, 4, 2) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"
    assert _computes("zb_h1", 3, 1, 4, 0) == (
        "F0.0 F0.1 F0.2 BI0.0 BW0.0 F0.3 BI0.1 BW0.1 BI0.2 BW0.2 BI0.3 BW0.3"
    )
    assert _computes("zb_h1", 3, 1, 4, 2) == (
        "F2.0 BI2.0 F2.1 BI2.1 F2.2 BI2.2 BW2.0 F2.3 BI2.3 BW2.1 BW2.2 BW2.3"
    )
    assert _computes("1f1b", 1, 1, 3, 0) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
    # MegaScale Figure 2's kind: the last of 2 stages, 2 chunks, 2 warm-up forwards
    assert _computes("interleaved_1f1b", 2, 2, 4, 1) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


def test_a_cut_backward_sends_its_gradient_between_the_halves() -> None:
    """The receive for the next forward is posted before both: the weights' half may be empty."""
    shape = PipelineShape(4, 2, 16)
    actions = build_stage("interleaved_1f1b", shape, 1, split_backward=True)
    text = " ".join(map(str, actions))
    assert "RA1.7@0 BI5.2 SG5.2@0 BW5.2 RG5.3@2 F1.7 SA1.7@2" in text


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_a_cut_schedule_is_the_whole_one_with_each_backward_in_two(schedule: Schedule) -> None:
    """Decoupled, a gradient's send stands between the halves. Without the weights' halves the order
    is that of whole backwards, transfers included."""
    name, shape, kind = schedule.name, schedule.shape, SCHEDULES[schedule.name]
    if kind.splits_backward or kind.forward_only:
        return
    options: dict[str, Any] = {
        "transfers": schedule.transfers,
        "shared_head": schedule.shared_head,
    }
    for stage in range(shape.stages):
        whole = build_stage(name, shape, stage, **options)
        cut = build_stage(name, shape, stage, split_backward=True, **options)
        for half in (a for a in cut if a.kind is ActionKind.BACKWARD_INPUT):
            sends = sends_of(shape, half) if schedule.transfers == "decoupled" else []
            follow = (*sends, replace(half, kind=ActionKind.BACKWARD_WEIGHT))
            place = cut.index(half) + 1
            assert cut[place : place + len(follow)] == follow
        left = [a for a in cut if a.kind is not ActionKind.BACKWARD_WEIGHT]
        as_whole = {ActionKind.BACKWARD_INPUT: ActionKind.BACKWARD}
        assert [replace(a, kind=as_whole.get(a.kind, a.kind)) for a in left] == list(whole)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_a_burst_of_weight_gradients_keeps_no_neighbour_waiting(name: str) -> None:
    """Of each chunk's K micro-batches the last computes the weights' halves of all: cut, they are
    off the way of the gradient."""
    joined, stages, micro_batches = 4, 4, 16

    def cost(action: Action) -> float:
        burst = float(joined) if action.micro_batch % joined == joined - 1 else 0.0
        costs = {
            ActionKind.FORWARD: 1.0,
            ActionKind.BACKWARD: 1.0 + burst,
            ActionKind.BACKWARD_INPUT: 1.0,
            ActionKind.BACKWARD_WEIGHT: burst,
        }
        return costs[action.kind]

    chunks = 2 if name == "interleaved_1f1b" else 1
    work = 3.0 * micro_batches * chunks
    idle = [
        step_time(
            build_schedule(
                name,
                stages=stages,
                chunks_per_stage=chunks,
                micro_batches=micro_batches,
                transfers="decoupled",
                split_backward=split,
            ),
            cost,
        )
        - work
        for split in (False, True)
    ]
    assert idle[1] < 0.5 * idle[0], idle


def test_decoupled_receive_before_a_steady_backward_feeds_the_next_forward() -> None:
    """MegaScale 3.2, Figure 4: around a backward, the receive and the send are the others'."""
    actions = build_stage("interleaved_1f1b", PipelineShape(4, 2, 16), 1)
    text = " ".join(map(str, actions))
    assert "RA1.7@0 B5.2 SG5.2@0 RG5.3@2 F1.7 SA1.7@2" in text


@pytest.mark.parametrize(("p", "v"), [(2, 1), (4, 2), (8, 6)])
def test_interleaving_holds_what_megatron_states(p: int, v: int) -> None:
    """In flight on stage 0, in whole stages: p * (1 + (p - 1) / (p v)) (2104.04473, 2205.05198)."""
    schedule = build_schedule(
        "interleaved_1f1b", stages=p, chunks_per_stage=v, micro_batches=4 * p, transfers="coupled"
    )
    assert schedule.in_flight_limits[0] / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 micro-batches cannot fill 4 stages"):
        build_stage("1f1b", PipelineShape(4, 1, 3), 0)
    with pytest.raises(AssertionError, match="multiples of the stages"):
        build_stage("interleaved_1f1b", PipelineShape(4, 2, 6), 0)
    with pytest.raises(AssertionError, match="one chunk a stage"):
        build_stage("1f1b", PipelineShape(4, 2, 8), 0)
    with pytest.raises(AssertionError, match="single stage"):
        PipelineShape(1, 2, 8)
    with pytest.raises(AssertionError, match="schedule is one of"):
        build_stage("zigzag", PipelineShape(1, 1, 1), 0)


def test_coupled_waits_before_each_compute_that_follows_a_transfer() -> None:
    actions = build_stage("1f1b", PipelineShape(4, 1, 8), 1, transfers="coupled")
    for before, action in pairwise(actions):
        if action.kind is ActionKind.FORWARD or action.kind in INPUT_GRADIENTS:
            assert before.kind is ActionKind.WAIT or before.peer_stage is None


@settings(max_examples=80, deadline=None)
@given(schedules())
def test_decoupled_transfers_run_beside_a_compute_in_every_phase(schedule: Schedule) -> None:
    """Warm-up and cool-down too: between a receive and the compute that waits for it stands another
    one that is more than a weights' half, unless it is the stage's first; and a send is waited for
    by no compute of its stage."""
    if schedule.transfers != "decoupled":
        return
    for actions in schedule.actions:
        posted: dict[Action, int] = {}
        num_computes = 0
        for action in actions:
            assert action.kind is not ActionKind.WAIT
            if action.kind in RECEIVES:
                posted[action] = num_computes
            elif action.kind in COMPUTES:
                for receive in receives_for(schedule.shape, action):
                    assert posted[receive] < num_computes or num_computes == 0, (receive, action)
                num_computes += action.kind is not ActionKind.BACKWARD_WEIGHT
