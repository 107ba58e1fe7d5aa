"""Data-parallel communication around the computes, each timeline computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.plan.case import Software
from megascale.plan.simulate import Timeline, simulate
from tests.plan.simulate.prices import case_of, chunk_prices, prices_of

LATE = Software(overlap_grad_reduce=False, overlap_param_gather=False)
TWO_BUCKETS: dict[str, Any] = {
    "reduce_s": (1.0, 0.2),  # in the order of backward: the second bucket first
    "gather_s": (0.2, 1.0),
    "update_s": 1.0,
}


def _data(timeline: Timeline, stage: int = 0) -> list[tuple[str, str, float, float]]:
    """To the nanosecond, so that hand-made numbers are equal to them."""
    return [
        (span.kind, span.what, round(span.start_s, 9), round(span.end_s, 9))
        for span in timeline.spans(stage)
        if span.lane == "data"
    ]


def _forwards(timeline: Timeline, stage: int) -> list[tuple[float, float]]:
    spans = [span for span in timeline.spans(stage) if span.kind == "forward"]
    return [(round(span.start_s, 9), round(span.end_s, 9)) for span in spans]


def _begins(timeline: Timeline, kind: str) -> list[float]:
    return [span.start_s for span in timeline.spans(0) if span.kind == kind]


def test_zero_1_by_hand() -> None:
    """Update and its gathers, two micro-batches of forward 1 and backward 2, the last reductions.
    The second half of the first forward waits for the second gather."""
    case = case_of(2, data=4)
    timeline = simulate(case, prices_of(case, **TWO_BUCKETS))
    assert _data(timeline) == [
        ("param_gather", "bucket 0", 0.5, 0.7),
        ("param_gather", "bucket 1", 1.0, 2.0),
        ("grad_sync", "bucket 1", 6.5, 7.5),
        ("grad_sync", "bucket 0", 7.5, 7.7),
    ]
    assert _forwards(timeline, 0) == [(1.0, 1.5), (2.0, 2.5), (4.5, 5.5)]
    assert timeline.step_s == pytest.approx(7.7)
    parts = timeline.parts[0]
    assert parts.data_s == pytest.approx(0.5 + 0.2)
    assert (parts.update_s, parts.bubble_s, parts.slowed_s) == (1.0, 0.0, 0.0)


def test_without_overlap_all_of_it_is_exposed() -> None:
    case = case_of(2, software=LATE, data=4)
    timeline = simulate(case, prices_of(case, **TWO_BUCKETS))
    assert timeline.step_s == pytest.approx(1.0 + 1.2 + 6.0 + 1.2)
    assert timeline.parts[0].data_s == pytest.approx(2.4)
    assert _begins(timeline, "grad_sync") == [pytest.approx(8.2), pytest.approx(9.2)]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(2, 4), st.integers(2, 3), st.floats(0.01, 0.9))
def test_overlap_hides_all_but_the_first_gather_and_the_last_reduction(
    stages: int, chunks: int, groups: int, each_s: float
) -> None:
    """MegaScale 3.2, where a chunk's collective is shorter than its computes."""
    case = case_of(
        stages * groups, pipeline=stages, virtual=chunks, data=4, schedule="interleaved_1f1b"
    )
    alone = simulate(case, prices_of(case))
    beside = simulate(case, prices_of(case, reduce_s=(each_s,), gather_s=(each_s,)))
    assert beside.step_s == pytest.approx(alone.step_s + 2 * each_s)
    late = simulate(
        replace(case, software=LATE), prices_of(case, reduce_s=(each_s,), gather_s=(each_s,))
    )
    assert late.step_s == pytest.approx(alone.step_s + 2 * chunks * each_s)


def test_zero_2_reduces_every_micro_batch_and_keeps_two_buffers() -> None:
    """Reductions of 10 beside forward 1 and backward 2: the third backward waits for the first."""
    case = case_of(3, data=2, zero_stage=2)
    timeline = simulate(case, prices_of(case, reduce_s=(10.0,)))
    assert _begins(timeline, "backward") == [1.0, 4.0, 13.0]
    assert _data(timeline) == [
        ("grad_sync", "bucket 0", 3.0 + 10 * i, 13.0 + 10 * i) for i in range(3)
    ]
    assert timeline.step_s == 33.0
    late = simulate(replace(case, software=LATE), prices_of(case, reduce_s=(10.0,)))
    assert late.step_s == 39.0


def test_zero_3_gathers_one_bucket_ahead_of_each_use() -> None:
    """The second bucket's backward follows its forward at once, so its parameters stay."""
    case = case_of(1, data=2, zero_stage=3)
    timeline = simulate(case, prices_of(case, reduce_s=(0.3, 0.3), gather_s=(0.5, 0.5)))
    assert _data(timeline) == [
        ("param_gather", "bucket 0", 0.0, 0.5),
        ("param_gather", "bucket 1", 0.5, 1.0),
        ("param_gather", "bucket 0", 1.5, 2.0),
        ("grad_sync", "bucket 1", 2.5, 2.8),
        ("grad_sync", "bucket 0", 3.5, 3.8),
    ]
    assert timeline.step_s == pytest.approx(3.8)
    assert timeline.parts[0].data_s == pytest.approx(0.5 + 0.3)


def test_joined_weight_gradients_reduce_in_the_last_burst() -> None:
    case = case_of(3, data=2, join_weight_gradients=2)
    timeline = simulate(case, prices_of(case, reduce_s=(0.5,)))
    # f b f b w(2) f b w(1): the second burst is the last of its chunk
    assert _begins(timeline, "grad_sync") == [9.0]
    assert timeline.step_s == 9.5


def test_compute_beside_a_reduction_is_slower() -> None:
    """1.25 times as long: of the 0.5 s beside it, 0.4 s of work are done."""
    case = case_of(1, data=2)
    timeline = simulate(case, prices_of(case, reduce_s=(0.5, 0.5), slow_down=1.25))
    assert _begins(timeline, "grad_sync") == [pytest.approx(2.0), pytest.approx(3.1)]
    assert timeline.parts[0].slowed_s == pytest.approx(0.1)
    assert timeline.step_s == pytest.approx(3.6)


def test_compute_is_slowed_by_a_transfer_that_begins_in_the_middle_of_it() -> None:
    """Twice as long beside a transfer of 1 s. Stage 0: F0 0-2; F1 is half beside the send 2-3, so
    it ends at 4.5. Stage 1: F0 begins at 3 and is slowed from 4.5, when the second one arrives."""
    case = case_of(2, pipeline=2)
    prices = prices_of(case, chunk_prices(2.0, 0.0, 0.0), transfer_s=1.0, transfer_slow_down=2.0)
    timeline = simulate(case, prices, forward_only=True)
    assert _forwards(timeline, 0) == [(0.0, 2.0), (2.0, 4.5)]
    assert _forwards(timeline, 1) == [(3.0, 5.5), (5.5, 7.5)]
    assert timeline.parts[0].slowed_s == pytest.approx(0.5)
    assert timeline.parts[1].slowed_s == pytest.approx(0.5)


def test_losses_beside_both_kinds_of_communication_add() -> None:
    """Half speed beside a transfer, a fifth less beside a reduction, 0.3 beside both."""
    case = case_of(2, pipeline=2, data=2, zero_stage=2)
    prices = prices_of(
        case,
        chunk_prices(2.0, 1.0, 1.0),
        transfer_s=1.0,
        transfer_slow_down=2.0,
        reduce_s=(0.5,),
        slow_down=1.25,
    )
    timeline = simulate(case, prices)
    # stage 1: its first backward is over at 7 (F0 3-5, B0 5-7); gradient out and reduction from 7;
    # F1's activation arrived 5-6 beside B0, which 0.5 longer: all from 7.5
    # 0.5 s at speed 0.3, 0.5 s at 0.5, the other 1.6 at full speed
    assert _forwards(timeline, 1)[1] == (7.5, 7.5 + 1.0 + 1.6)


def test_what_surrounds_the_pipeline() -> None:
    """Loading and fixed costs come before it, the sum of tied embeddings behind both ends."""
    case = case_of(2, pipeline=2, data=2)
    prices = prices_of(case, reduce_s=(0.5,), gather_s=(0.1,), update_s=1.0)
    prices = replace(prices, load_s=0.3, fixed_s=0.2, embedding_s=0.4)
    timeline = simulate(case, prices)
    # update 1, load and fixed 0.5 that hide the gather, pipeline 9, stage 0's reduction, the sum
    assert timeline.pipeline_end_s == pytest.approx(10.5)
    assert timeline.step_s == pytest.approx(10.5 + 0.5 + 0.4)
    for parts in timeline.parts:
        assert parts.load_s == pytest.approx(0.3)
        assert parts.fixed_s == pytest.approx(0.2)
        assert parts.embedding_s == pytest.approx(0.4)
        assert parts.data_s == pytest.approx(0.5)
    assert [s.lane for s in timeline.spans(0) if s.kind == "load"] == ["host"]
    assert _data(timeline, stage=1)[-1] == ("tied_sum", "", 11.0, 11.4)
