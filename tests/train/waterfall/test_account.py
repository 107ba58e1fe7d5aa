"""The arithmetic of the waterfall on events that were made by hand: every ns has its class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megascale.events import Header, Span, Step, run_header
from megascale.topology import Mesh
from megascale.train.waterfall.account import (
    CLASSES,
    StepTimes,
    corrected,
    exposed_tp_ns,
    names_of,
    slowed_ns,
    times_of,
)

TP2 = names_of(run_header(Mesh(tensor=2), 0, host="here"))
STEP = Step(rank=0, step=4, t0_ns=1000, dur_ns=900, clock="device", sampled=True)


def span(name: str, t0_ns: int, end_ns: int, **fields: Any) -> Span:
    made = Span(rank=0, name=name, t0_ns=t0_ns, dur_ns=end_ns - t0_ns, clock="device", step=4)
    return replace(made, **fields)


def op(key: str, work: str, t0_ns: int, end_ns: int, name: str = "op_forward") -> Span:
    return span(name, t0_ns, end_ns, op=key, work=work)


def test_time_belongs_to_the_innermost_span_and_through_it_to_the_nearest_class() -> None:
    spans = [
        span("forward", 1050, 1550, chunk=0, micro_batch=0),
        op("layer", "elementwise", 1100, 1500),
        op("attn.qkv", "gemm", 1150, 1300),
        span("tp_all_gather_gemm", 1160, 1290, group="tensor", seq=1),  # inside a linear: its own
        op("attn.core", "attention", 1300, 1450),
        op("attn.heads", "elementwise", 1310, 1330),
        span("optimizer", 1600, 1700),
    ]
    times = times_of(STEP, 2000, reversed(spans), TP2)
    assert times.window_ns == 1000
    assert times.by_class == {
        "residual": 50 + 50 + 50 + 50 + 200,  # before and around the layer, around the optimizer
        "elementwise": 50 + 20 + 50,
        "gemm": 150,
        "attention": 130,
        "optimizer": 100,
        "host": 100,  # from the step's end to the next one's begin
    }
    assert sum(times.by_class.values()) == times.window_ns
    assert times.residual == {"step": 50 + 50 + 200, "forward": 50 + 50}
    assert times.by_key()["attention", "attn.core", "op_forward"] == (130, 1)
    assert times.by_key()["elementwise", "layer", "op_forward"] == (100, 1)


def test_a_mark_that_was_launched_late_kept_the_device_waiting() -> None:
    spans = [
        op("one", "gemm", 1000, 1400),
        replace(op("two", "gemm", 1500, 1800), issued_ns=1470),
        replace(op("three", "gemm", 1850, 1900), issued_ns=1100),  # launched long before
    ]
    times = times_of(STEP, 1900, spans, TP2)
    assert times.by_class["host"] == 70
    assert times.by_class["residual"] == 30 + 50
    assert times.by_class["gemm"] == 750


def test_spans_of_another_clock_do_not_count() -> None:
    waiting = replace(span("data_wait", 1000, 1900, stream="host"), clock="host")
    assert times_of(STEP, 1900, [waiting], TP2).by_class == {"residual": 900}


@pytest.mark.parametrize(
    ("mesh", "classes"),
    [
        (Mesh(pipeline=2, data=2), {"world_sums": "pp", "grad_sync": "dp", "param_gather": "dp"}),
        (Mesh(data=2, tensor=2), {"world_sums": "dp", "grad_sync": "dp", "param_gather": "dp"}),
        (Mesh(tensor=2), {"world_sums": "tp", "grad_sync": "tp", "param_gather": "optimizer"}),
        (Mesh(), {"grad_sync": "optimizer", "param_gather": "optimizer"}),
    ],
)
def test_what_all_ranks_do_together_waits_for_the_outermost_axis(
    mesh: Mesh, classes: dict[str, str]
) -> None:
    header: Header = run_header(mesh, 0, host="here")
    names = names_of(header)
    assert {name: names[name] for name in classes} == classes


def _times(*selfs: tuple[str, int, int], name: str = "op_backward", **by_class: int) -> StepTimes:
    times = StepTimes(sum(by_class.values()), by_class)
    times.selfs = [(("gemm", key, name), t0, own) for key, t0, own in selfs]
    return times


def test_what_a_linear_takes_above_the_same_gemm_alone_is_exposed() -> None:
    times = _times(("qkv", 0, 130), ("qkv", 200, 150), ("head", 400, 90), gemm=370)
    alone = {"qkv": {"op_backward": 100}, "fc1": {"op_backward": 1}}
    assert exposed_tp_ns(times.by_key(), alone) == 80
    found = corrected(times, gemm_ideal_ns=200, alone_ns=alone, travelling=[], bubble_ns=0)
    assert (found["tp"], found["gemm_ideal"], found["gemm_inefficiency"]) == (80, 200, 90)
    faster = {"qkv": {"op_backward": 300}}
    assert exposed_tp_ns(times.by_key(), faster) == 0, "noise is not a gain"


def test_operators_beside_a_transfer_are_compared_with_those_apart() -> None:
    times = _times(("qkv", 0, 100), ("qkv", 10, 104), ("qkv", 50, 130), ("head", 55, 90), gemm=424)
    assert slowed_ns(times, [(45, 60)]) == {"gemm": 28}, "the head has nothing to compare with"
    found = corrected(times, gemm_ideal_ns=0, alone_ns={}, travelling=[(45, 60)], bubble_ns=0)
    assert (found["dp"], found["gemm_inefficiency"]) == (28, 396)


def test_waiting_beyond_what_the_schedule_asks_is_exposed_transfers() -> None:
    times = _times(gemm=500, pp=300, host=40, residual=10)
    found = corrected(times, gemm_ideal_ns=400, alone_ns={}, travelling=[], bubble_ns=220)
    assert (found["bubble"], found["pp"]) == (220, 80)
    assert tuple(found) == CLASSES
    assert sum(found.values()) == times.window_ns
    less = corrected(times, gemm_ideal_ns=400, alone_ns={}, travelling=[], bubble_ns=900)
    assert (less["bubble"], less["pp"]) == (300, 0), "no more than what it waited"
