"""Pipelines whose timelines are known: by hand, and by the formulas of the papers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.plan.case import Case, Software
from megascale.plan.prices import ChunkPrices, Spent
from megascale.plan.simulate import Timeline, simulate
from megascale.plan.simulate.engine import Engine
from megascale.plan.simulate.program import Label, Program, StageProgram, TransferTable, Wire
from tests.plan.simulate.prices import case_of, chunk_prices, prices_of

COUPLED = Software(transfers="coupled")


def _computes(timeline: Timeline, stage: int) -> list[tuple[str, int | None, float, float]]:
    return [
        (span.kind, span.micro_batch, span.start_s, span.end_s)
        for span in timeline.spans(stage)
        if span.lane == "compute"
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 12), st.floats(0.1, 3.0), st.floats(0.1, 3.0))
def test_1f1b_waits_for_p_minus_1_forwards_and_backwards(
    stages: int, more: int, forward: float, half: float
) -> None:
    case = case_of(stages + more, pipeline=stages)
    timeline = simulate(case, prices_of(case, chunk_prices(forward, half, half)))
    each = forward + 2 * half
    assert timeline.step_s == pytest.approx((stages + more + stages - 1) * each)
    for parts in timeline.parts:
        assert parts.bubble_s == pytest.approx((stages - 1) * each, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 4))
def test_chunks_divide_the_bubble(stages: int, chunks: int, groups: int) -> None:
    """(p - 1) / (v m) of the work (2104.04473)."""
    case = case_of(stages * groups, pipeline=stages, virtual=chunks, schedule="interleaved_1f1b")
    timeline = simulate(case, prices_of(case))
    work = 3.0 * chunks * case.micro_batches
    share = (stages - 1) / (chunks * case.micro_batches)
    assert timeline.step_s == pytest.approx(work * (1 + share))
    assert timeline.bubble_share == pytest.approx(share / (1 + share))


@pytest.mark.parametrize("name", ["zb_h1", "interleaved_zb"])
def test_zero_bubble_schedules_have_a_third_of_it(name: str) -> None:
    chunks = 1 if name == "zb_h1" else 3
    below = "1f1b" if name == "zb_h1" else "interleaved_1f1b"
    layout: dict[str, Any] = {"pipeline": 4, "virtual": chunks}
    split, whole = (
        simulate(case, prices_of(case))
        for case in (case_of(12, schedule=one, **layout) for one in (name, below))
    )
    assert split.parts[0].bubble_s == pytest.approx(whole.parts[0].bubble_s / 3)


def test_two_stages_by_hand() -> None:
    case = case_of(2, pipeline=2)
    timeline = simulate(case, prices_of(case, transfer_s=0.5))
    assert _computes(timeline, 0) == [
        ("forward", 0, 0.0, 1.0),
        ("forward", 1, 1.0, 2.0),
        ("backward", 0, 5.0, 7.0),
        ("backward", 1, 8.0, 10.0),
    ]
    assert _computes(timeline, 1) == [
        ("forward", 0, 1.5, 2.5),
        ("backward", 0, 2.5, 4.5),
        ("forward", 1, 4.5, 5.5),
        ("backward", 1, 5.5, 7.5),
    ]
    first, last = timeline.parts
    assert (first.bubble_s, first.transfer_s) == (3.0, 1.0)
    assert (last.bubble_s, last.transfer_s) == (3.0, 1.0)
    assert timeline.step_s == 10.0
    sent = [span for span in timeline.spans(0) if span.lane == "send activation"]
    # the second leaves when its receive is posted: one compute ahead of its use
    assert [(span.start_s, span.end_s) for span in sent] == [(1.0, 1.5), (2.5, 3.0)]


def test_coupled_transfers_by_hand() -> None:
    """The send of the second activation leaves when the other stage gives back its gradient."""
    case = case_of(2, software=COUPLED, pipeline=2)
    timeline = simulate(case, prices_of(case, transfer_s=0.5))
    assert _computes(timeline, 0) == [
        ("forward", 0, 0.0, 1.0),
        ("forward", 1, 1.5, 2.5),
        ("backward", 0, 5.0, 7.0),
        ("backward", 1, 8.5, 10.5),
    ]
    sent = [span for span in timeline.spans(0) if span.lane == "send activation"]
    assert [(span.start_s, span.end_s) for span in sent] == [(1.0, 1.5), (4.5, 5.0)]
    assert timeline.step_s == 10.5


def test_a_third_send_waits_for_the_first() -> None:
    """A fast stage before a slow one: the forward behind the third unmet send is held up."""
    case = case_of(6, pipeline=2, schedule="1f1b")
    prices = prices_of(case)
    slow = ChunkPrices(Spent(gemm_s=10.0), Spent(), Spent(), Spent())
    prices = replace(prices, chunks=(prices.chunks[0], slow))
    timeline = simulate(case, prices, forward_only=True)
    starts = [start for _, _, start, _ in _computes(timeline, 0)]
    assert starts == [0.0, 1.0, 2.0, 3.0, 4.0, 11.0]
    assert timeline.step_s == 61.0
    assert timeline.parts[1].bubble_s == 1.0


def test_a_stage_has_one_link_each_way() -> None:
    """Four transfers of 1 s, ready at 0: 1 to 2 shares its link out with 1 to 0, and 2 to 0 its
    link in, so both wait for it; 0 to 1 has both of its own."""
    table = TransferTable()
    stages = [StageProgram(stage) for stage in range(3)]
    numbers = []
    for source, destination in ((1, 2), (1, 0), (2, 0), (0, 1)):
        wire = Wire("activation" if destination > source else "gradient", source, destination)
        for end in (source, destination):
            ends = (source, destination)
            number = table.post(wire, end, ends, Label("transfer", 0, 0, wire.payload), 1.0)
            stages[end].post(number)
        numbers.append(number)
    engine = Engine(Program(stages, table))
    engine.run()
    assert [engine.begin_s[number] for number in numbers] == [1.0, 0.0, 1.0, 0.0]
    assert [engine.met_s[number] for number in numbers] == [0.0] * 4


def test_weight_gradients_are_joined_as_the_runtime_joins_them() -> None:
    case = case_of(5, join_weight_gradients=2)
    timeline = simulate(case, prices_of(case))
    kinds = [kind[0] if kind != "backward_weight" else "w" for kind, *_ in _computes(timeline, 0)]
    assert "".join(kinds) == "fbfbwfbfbwfbw"
    weights = [s.duration_s for s in timeline.spans(0) if s.kind == "backward_weight"]
    assert weights == [2.0, 2.0, 1.0]


def test_forward_passes_alone() -> None:
    case = case_of(3, pipeline=2, virtual=2, schedule="interleaved_zb", share_head=True)
    prices = replace(prices_of(case, update_s=5.0), head=chunk_prices(0.5, 1.0, 1.0))
    timeline = simulate(case, prices, forward_only=True)
    kinds = {kind for kind, *_ in _computes(timeline, 0)}
    assert kinds == {"forward", "head"}
    assert timeline.parts[0].compute_s == pytest.approx(3 * (2 * 1.0 + 0.5))
    assert timeline.parts[0].update_s == 0.0


def test_stages_meet_at_a_shared_head() -> None:
    """Broadcast, head, sum of gradients under the head's weight gradients; then the backward."""
    case = case_of(2, pipeline=2, virtual=2, schedule="interleaved_1f1b", share_head=True)
    prices = replace(prices_of(case, transfer_s=0.5), head=chunk_prices(0.25, 0.5, 0.25))
    timeline = simulate(case, prices)
    heads = [[s for s in timeline.spans(stage) if s.kind == "head"] for stage in (0, 1)]
    # F0 F1 F2 | F3 of micro-batch 0: four forwards and three transfers, then the broadcast
    assert heads[1][0].start_s == pytest.approx(4 + 3 * 0.5 + 0.5)
    assert [s.start_s for s in heads[0]] == [s.start_s for s in heads[1]]
    sums = [s for s in timeline.spans(1) if s.kind == "head_gradient"]
    weights = [s for s in timeline.spans(1) if s.kind == "backward_weight"]
    backward = next(s for s in timeline.spans(1) if s.kind == "backward" and s.chunk == 3)
    assert sums[0].start_s == heads[1][0].end_s == weights[0].start_s
    assert backward.start_s == sums[0].end_s > weights[0].end_s


@st.composite
def pipelines(draw: st.DrawFn) -> Case:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb"]))
    stages = draw(st.integers(2, 6))
    interleaved = name.startswith("interleaved")
    count = stages * draw(st.integers(1, 3)) if interleaved else stages + draw(st.integers(0, 5))
    return case_of(
        count,
        pipeline=stages,
        virtual=draw(st.integers(2, 3)) if interleaved else 1,
        schedule=name,
        join_weight_gradients=draw(st.integers(1, 3)),
    )


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.floats(0.0, 1.5), st.floats(0.2, 2.0))
def test_coupled_transfers_are_never_faster(case: Case, transfer_s: float, half: float) -> None:
    decoupled, coupled = (
        simulate(one, prices_of(one, chunk_prices(1.0, half, half), transfer_s=transfer_s))
        for one in (case, Case(case.job, case.layout, COUPLED))
    )
    assert coupled.step_s >= decoupled.step_s - 1e-9
