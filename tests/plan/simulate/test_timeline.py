"""What holds for every simulated step, whatever its shape and prices."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.plan.case import Case, Software
from megascale.plan.estimate import estimate
from megascale.plan.prices import StepPrices
from megascale.plan.schedules import SCHEDULES, build_schedule
from megascale.plan.schedules.shared_head import MOST_STAGES
from megascale.plan.simulate import SimulatedSpan, Timeline, simulate
from megascale.plan.simulate.engine import Engine
from megascale.plan.simulate.program import Label, Program, StageProgram, TransferTable, Wire
from tests.plan.simulate.prices import case_of, chunk_prices, prices_of

TOLERANCE_S = 1e-9


@st.composite
def priced_cases(draw: st.DrawFn) -> tuple[Case, StepPrices]:
    names = sorted(set(SCHEDULES) - {"forward_only"})
    name = draw(st.sampled_from(names))
    stages = draw(st.integers(1, 6))
    interleaved = name.startswith("interleaved")
    shares = interleaved and 1 < stages <= MOST_STAGES and draw(st.booleans())
    count = stages * draw(st.integers(1, 3)) if interleaved else stages + draw(st.integers(0, 4))
    software = Software(
        transfers="decoupled" if shares else draw(st.sampled_from(["decoupled", "coupled"])),
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
    )
    case = case_of(
        count,
        software=software,
        pipeline=stages,
        virtual=draw(st.integers(2, 3)) if interleaved and stages > 1 else 1,
        data=2,
        schedule=name,
        share_head=shares,
        zero_stage=draw(st.integers(1, 3)),
        join_weight_gradients=draw(st.integers(1, 3)),
    )
    seconds = st.floats(0.05, 2.0)
    buckets = draw(st.integers(0, 3))
    times = st.tuples(*[st.floats(0.0, 1.5)] * buckets)
    prices = prices_of(
        case,
        chunk_prices(draw(seconds), draw(seconds), draw(seconds)),
        transfer_s=draw(st.floats(0.0, 0.5)),
        transfer_slow_down=draw(st.floats(1.0, 1.4)),
        reduce_s=draw(times),
        gather_s=draw(times),
        slow_down=draw(st.floats(1.0, 1.4)),
        update_s=draw(st.floats(0.0, 1.0)),
    )
    head = chunk_prices(draw(seconds), draw(seconds), draw(seconds)) if shares else None
    return case, replace(prices, head=head, load_s=0.1, fixed_s=0.2, embedding_s=0.05)


@settings(max_examples=120, deadline=None)
@given(priced_cases())
def test_parts_sum_to_the_step_and_lanes_do_not_overlap(priced: tuple[Case, StepPrices]) -> None:
    case, prices = priced
    timeline = simulate(case, prices)
    for stage, parts in enumerate(timeline.parts):
        assert parts.total_s == pytest.approx(timeline.step_s, abs=TOLERANCE_S)
        assert min(vars(parts).values()) >= -TOLERANCE_S, parts
        lanes: dict[str, list[SimulatedSpan]] = defaultdict(list)
        for span in timeline.spans(stage):
            assert 0.0 <= span.start_s <= span.end_s <= timeline.step_s + TOLERANCE_S
            lanes[span.lane].append(span)
        for spans in lanes.values():
            for before, after in pairwise(spans):
                assert before.end_s <= after.start_s + TOLERANCE_S, (before, after)


@settings(max_examples=60, deadline=None)
@given(priced_cases())
def test_every_action_is_there_and_sends_meet_receives(priced: tuple[Case, StepPrices]) -> None:
    case, prices = priced
    timeline = simulate(case, prices)
    layout = case.layout
    schedule = build_schedule(
        layout.schedule,
        stages=layout.pipeline,
        chunks_per_stage=layout.virtual,
        micro_batches=case.micro_batches,
        transfers=case.software.transfers,
        shared_head=layout.share_head,
        split_backward=layout.join_weight_gradients > 1,
    )
    sent, received = _transfers(timeline, "send"), _transfers(timeline, "recv")
    assert sent.keys() == received.keys()
    count = sum(1 for acts in schedule.actions for a in acts if a.kind.value in ("SA", "SG"))
    assert len(sent) == count
    for number, send in sent.items():
        receive = received[number]
        assert (send.start_s, send.end_s) == (receive.start_s, receive.end_s)
        assert (send.micro_batch, send.what) == (receive.micro_batch, receive.what)
        assert send.chunk is not None
        ahead = 1 if send.what == "activation" else -1
        assert receive.chunk == send.chunk + ahead
        assert schedule.shape.stage_of(send.chunk) == send.stage
        assert schedule.shape.stage_of(send.chunk + ahead) == receive.stage
    for stage, actions in enumerate(schedule.actions):
        forwards = [(a.chunk, a.micro_batch) for a in actions if a.kind.value == "F"]
        spans = [s for s in timeline.spans(stage) if s.kind == "forward"]
        assert list(dict.fromkeys((s.chunk, s.micro_batch) for s in spans)) == forwards


def _transfers(timeline: Timeline, kind: str) -> dict[int, SimulatedSpan]:
    spans = [s for stage in range(timeline.num_stages) for s in timeline.spans(stage)]
    found = {s.transfer: s for s in spans if s.kind == kind and s.transfer is not None}
    assert len(found) == sum(s.kind == kind for s in spans)
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.floats(0.0, 0.3))
def test_the_closed_form_agrees_where_it_is_exact(
    stages: int, chunks: int, groups: int, each_s: float
) -> None:
    """Equal chunks, transfers that take no time, collectives shorter than a chunk's computes."""
    chunks = chunks if stages > 1 else 1
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    case = case_of(stages * groups, pipeline=stages, virtual=chunks, data=2, schedule=name)
    prices = prices_of(case, reduce_s=(each_s,), gather_s=(each_s,), update_s=0.5)
    found = simulate(case, prices)
    closed = estimate(case, prices, peak_tflops=1.0)
    assert found.step_s == pytest.approx(closed.step_s)
    assert found.parts[0].bubble_s == pytest.approx(closed.parts["bubble"])
    assert found.parts[0].data_s == pytest.approx(closed.parts["reduce"] + closed.parts["gather"])


def test_a_list_that_cannot_end_is_a_fault_of_ours() -> None:
    table = TransferTable()
    wire, label = Wire("activation", 0, 1), Label("transfer", 0, 0, "activation")
    stages = [StageProgram(0), StageProgram(1)]
    transfer = table.post(wire, 0, (0, 1), label, 1.0)
    stages[0].post(transfer)
    stages[0].need(transfer)
    with pytest.raises(AssertionError, match=r"deadlock: stages \[0\] wait"):
        Engine(Program(stages, table)).run()


@pytest.mark.parametrize(
    ("pipeline", "virtual", "micro_batches", "limit_s"), [(35, 3, 280, 3.0), (8, 6, 192, 1.0)]
)
def test_the_papers_sizes_take_seconds(
    pipeline: int, virtual: int, micro_batches: int, limit_s: float
) -> None:
    """530B and 175B of MegaScale's Table 1, everything beside everything. Time of this process."""
    case = case_of(
        micro_batches, pipeline=pipeline, virtual=virtual, data=4, schedule="interleaved_1f1b"
    )
    prices = prices_of(
        case,
        transfer_s=0.1,
        transfer_slow_down=1.1,
        reduce_s=(0.5, 0.5),
        gather_s=(0.5, 0.5),
        slow_down=1.1,
        update_s=1.0,
    )
    begin_s = time.process_time()
    simulate(case, prices)
    assert time.process_time() - begin_s < limit_s
