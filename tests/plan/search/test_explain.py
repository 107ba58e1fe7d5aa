"""Why a layout lost: parts in order, their sum the whole, and what is set otherwise."""

from __future__ import annotations

import pytest

from megascale.plan.case import Layout
from megascale.plan.search.explain import (
    describe_layout,
    describe_switches,
    difference,
    why_slower,
)
from megascale.plan.search.parts import WORDS, of_formula, of_simulation
from megascale.plan.search.result import Ranked


def _ranked(layout: Layout, parts: dict[str, float], *num_bytes: int) -> Ranked:
    step_s = sum(parts.values())
    return Ranked(layout, 1, step_s, 0.5, 0.5, parts, num_bytes, step_s, simulated=True)


def test_the_differences_sum_to_what_is_lost() -> None:
    best = {"gemm": 3.0, "bubble": 0.2}
    other = {"gemm": 2.9, "bubble": 0.7, "data": 0.1}
    more = difference(best, other)
    assert list(more) == ["bubble", "gemm", "data"]
    assert sum(more.values()) == pytest.approx(sum(other.values()) - sum(best.values()))


def test_small_parts_are_told_together() -> None:
    best = _ranked(Layout(), {"gemm": 3.0, "bubble": 0.2, "data": 0.1, "update": 0.1}, 2**30)
    other = _ranked(
        Layout(join_weight_gradients=2),
        {"gemm": 3.0, "bubble": 1.2, "data": 0.12, "update": 0.13},
        3 * 2**29,
        2**29,
    )
    head, parts, switches, memory = why_slower(best, other)
    assert head == "TP 1, PP 1, DP 1, micro-batch 1: +1.050 s a step (+30.9%)"
    assert parts == "pipeline bubble +1.000 s, the rest +0.050 s"
    assert switches == "it differs in joined weight gradients 2 instead of 1"
    assert memory == "and holds 512.00MiB more on its fullest stage"


def test_layouts_in_words() -> None:
    layout = Layout(
        tensor=8,
        pipeline=4,
        virtual=3,
        data=2,
        micro_batch_size=2,
        zero_stage=2,
        recompute="full",
        schedule="interleaved_zb",
        share_head=True,
        join_weight_gradients=4,
    )
    assert describe_layout(layout) == "TP 8, PP 4 x 3, DP 2, micro-batch 2"
    assert describe_switches(layout) == (
        "interleaved_zb, ZeRO-2, recompute full, shared head, weight gradients of 4 joined"
    )


def test_formula_and_simulation_speak_the_same_words() -> None:
    formula = of_formula({"gemm": 1.0, "pipeline": 0.5, "reduce": 0.25, "gather": 0.125})
    simulated = of_simulation({"gemm_s": 1.0, "transfer_s": 0.5, "data_s": 0.375})
    assert list(formula) == list(simulated) == list(WORDS)
    assert formula == simulated
    with pytest.raises(AssertionError, match="parts without a word"):
        of_formula({"magic": 1.0})
