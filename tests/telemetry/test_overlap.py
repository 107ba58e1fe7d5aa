"""The checker of overlaps: real runs of every layout pass; each overlap that is off is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megascale.events import Event, Span
from megascale.telemetry import overlap
from megascale.telemetry.overlap import Runs, beside, findings, orders, spans_of, travelling
from tests.distributed import run_ranks
from tests.train.waterfall.measured import run_marked

TP2 = "parallelism.tensor_parallel_size=2"
PP2 = "parallelism.pipeline_parallel_size=2"
VP2 = "parallelism.virtual_pipeline_size=2"
JOINED = "parallelism.join_weight_gradients=2"
# name: ranks, settings
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tp2": (2, [TP2]),
    "pp2-vp2": (2, [PP2, VP2]),
    "dp2": (2, []),
    "dp2-zero2": (2, ["parallelism.zero_stage=2"]),
    "tp2-dp2": (4, [TP2]),
    "pp2-dp2": (4, [PP2]),
    "pp2-zb": (2, [PP2, "parallelism.pipeline_schedule=zb_h1"]),
    "pp2-vp2-zb-dp2": (4, [PP2, VP2, "parallelism.pipeline_schedule=interleaved_zb"]),
    "pp2-vp2-shared": (2, [PP2, VP2, "parallelism.share_head=true"]),
    "tp2-joined": (2, [TP2, JOINED]),
    "pp2-vp2-joined": (2, [PP2, VP2, JOINED]),
    "pp2-vp2-shared-joined": (2, [PP2, VP2, "parallelism.share_head=true", JOINED]),
    "dp2-zero2-joined": (2, ["parallelism.zero_stage=2", JOINED]),
}


def _run(num_ranks: int, settings: Sequence[str]) -> Runs:
    arguments = (list(settings), None, 0.0, 4, True, False)
    found = run_ranks(run_marked, num_ranks, *arguments, timeout_s=100)
    return {rank: one.events for rank, one in enumerate(found)}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_hides_what_it_sends(layout: str) -> None:
    runs = _run(*LAYOUTS[layout])
    for step in (2, 3):
        assert [str(one) for one in findings(runs, step)] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "switch", "rule"),
    [
        ("dp2", "parallelism.overlap_grad_reduce=false", "gradients"),
        ("dp2", "parallelism.overlap_param_gather=false", "parameters"),
        ("pp2-dp2", "parallelism.overlap_grad_reduce=false", "gradients"),
        ("pp2-vp2", "parallelism.pipeline_transfers=coupled", "pipeline"),
    ],
)
def test_an_overlap_that_is_off_is_found(layout: str, switch: str, rule: str) -> None:
    num_ranks, settings = LAYOUTS[layout]
    found = findings(_run(num_ranks, [*settings, switch]), 3)
    assert {one.rule for one in found} == {rule}
    assert {one.rank for one in found} == set(range(num_ranks))


@pytest.mark.full
def test_gradients_travel_under_the_backward_of_the_layers_below() -> None:
    """Of four layers and a bucket each: under the one of layer 3 run layers 2, 1 and 0."""
    (_, events), *_ = _run(*LAYOUTS["dp2"]).items()
    spans = spans_of(events, 3)
    pairs = overlap._between_data_ranks(spans)
    layers = {}
    for post, wait in pairs:
        if post.name == "grad_sync":
            own = [s for s in beside(post, wait, spans) if s.op == "layer"]
            assert all(s.name == "op_backward" for s in own)
            layers[post.bucket] = len(own)
    counts = [n for bucket, n in layers.items() if bucket is not None and "layers" in bucket]
    assert sorted(counts) == [0, 1, 2, 3], layers


# ---------------------------------------------------------------- planted events


@pytest.fixture(name="tensor_run", scope="module")
def _tensor_run() -> Runs:
    return _run(*LAYOUTS["tp2"])


@pytest.mark.full
def test_a_gather_behind_the_input_gradient_is_found(tensor_run: Runs) -> None:
    events = list(tensor_run[1])
    own = {"tp_post": "all_gather", "tp_gemm": "input_gradient"}
    post, gemm = (_place(events, name, op) for name, op in own.items())
    events[post], events[gemm] = (
        replace(_at(events, one), t0_ns=_at(events, other).t0_ns)
        for one, other in ((post, gemm), (gemm, post))
    )
    (found,) = findings({**tensor_run, 1: events}, 3)
    assert (found.rule, found.rank) == ("tensor", 1)
    assert "gathers for the weight's gradient too late" in found.what


@pytest.mark.full
def test_two_ranks_in_another_order_are_found(tensor_run: Runs) -> None:
    assert orders(tensor_run, 3) == []
    events = list(tensor_run[1])
    first = _place(events, "tp_all_gather_gemm", None)
    events[first] = replace(_at(events, first), name="tp_gemm_reduce_scatter")
    (found,) = orders({**tensor_run, 1: events}, 3)
    assert (found.rule, found.rank) == ("order", 1)
    assert "of tensor is not rank 0" in found.what


def _place(events: Sequence[Event], name: str, op: str | None) -> int:
    """Of the first such span of step 3."""
    return next(
        i
        for i, e in enumerate(events)
        if isinstance(e, Span) and (e.step, e.name, e.op) == (3, name, op)
    )


def _at(events: Sequence[Event], place: int) -> Span:
    span = events[place]
    assert isinstance(span, Span)
    return span


def _span(name: str, t0_ns: int, end_ns: int, **fields: Any) -> Span:
    return replace(
        Span(rank=0, name=name, t0_ns=t0_ns, dur_ns=end_ns - t0_ns, clock="device", step=4),
        **fields,
    )


def test_what_is_in_flight_between_data_ranks() -> None:
    spans = [
        _span("param_gather", 10, 12, op="all_gather", bucket="a"),
        _span("param_gather", 12, 14, op="all_gather", bucket="b"),
        _span("param_gather", 20, 25, op="wait", bucket="a"),
        _span("param_gather", 40, 44, op="wait", bucket="b"),
        _span("grad_sync", 60, 61, op="reduce_scatter", bucket="b"),
        _span("grad_sync", 70, 71, op="reduce_scatter", bucket="a"),
        _span("grad_sync", 80, 95, op="finish"),
    ]
    assert travelling(spans) == [(10, 25), (12, 44), (60, 95), (70, 95)]


def test_a_receive_that_is_posted_late_is_found() -> None:
    spans = [
        _span("recv", 0, 1, op="activation", chunk=1, micro_batch=0),
        _span("forward", 2, 10, chunk=1, micro_batch=0),
        _span("recv", 11, 12, op="activation", chunk=1, micro_batch=1),
        _span("forward", 14, 20, chunk=1, micro_batch=1),
    ]
    (found,) = overlap.late_transfers(spans)
    assert "the activation of chunk 1, micro-batch 1 is not posted before" in found
    early = [replace(s, t0_ns=1) if s.t0_ns == 11 else s for s in spans]
    assert overlap.late_transfers(early) == []


def test_a_weights_half_hides_no_receive() -> None:
    """It may be empty: what stands between a receive and its consumer has to be a computation."""
    spans = [
        _span("backward_input", 0, 10, chunk=1, micro_batch=0),
        _span("recv", 11, 12, op="activation", chunk=1, micro_batch=1),
        _span("backward_weight", 13, 13, chunk=1, micro_batch=0),
        _span("forward", 14, 20, chunk=1, micro_batch=1),
    ]
    (found,) = overlap.late_transfers(spans)
    assert "the activation of chunk 1, micro-batch 1 is not posted before" in found
    early = [replace(s, t0_ns=-1) if s.name == "recv" else s for s in spans]
    assert overlap.late_transfers(early) == []


def test_a_gradient_that_leaves_behind_the_weights_half_is_found() -> None:
    spans = [
        _span("backward_input", 0, 10, chunk=1, micro_batch=3),
        _span("backward_weight", 12, 40, chunk=1, micro_batch=3, op="4 joined"),
        _span("send", 41, 42, op="gradient", chunk=1, micro_batch=3),
        _span("forward", 50, 60, chunk=3, micro_batch=4),
        _span("send", 61, 62, op="activation", chunk=3, micro_batch=4),
    ]
    (found,) = overlap.late_transfers(spans)
    assert "the gradient of chunk 1, micro-batch 3 is not sent before" in found
    early = [replace(s, t0_ns=11) if s.t0_ns == 41 else s for s in spans]
    assert overlap.late_transfers(early) == []
