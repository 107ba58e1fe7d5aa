"""The text and its JSON twin say the plan's numbers, the answer first."""

from __future__ import annotations

import json
from dataclasses import replace

from megascale.plan.report.document import plan_json
from megascale.plan.report.text import plan_text
from megascale.plan.search.result import Confidence
from tests.plan.report.plans import BEST, PLAN, SECOND, without


def test_the_answer_stands_in_the_first_lines() -> None:
    lines = plan_text(PLAN).splitlines()
    assert lines[0] == (
        "TP 2, PP 2 x 2, DP 4, micro-batch 1  (interleaved_1f1b, ZeRO-1, recompute none)"
    )
    assert lines[1] == (
        "  step 4.000 s +- 4.1%   MFU 50.0% (causal 47.5%)   16.0K tokens/s   memory 30.50GiB of "
        "139.00GiB (stage 1)"
    )
    assert lines[2] == (
        "  it goes to matrix products 75%, pipeline bubble 12%, tensor-parallel communication 12%"
    )
    # 1.6e9 / 16000 = 1e5 s = 1.157 days, 16 x 1e5 / 3600 = 444 GPU-hours x 2.5 = 1111; / 0.8
    assert lines[3] == (
        "  1.60B tokens: 1.16 days, 444 GPU-hours, cost 1.11K without faults; 1.45 days, 556 "
        "GPU-hours, cost 1.39K at the expected ETTR 0.800 (0.700 to 0.850)"
    )
    assert lines[4] == "  predicted for 16 x NVIDIA H200, cluster 'h200'"


def test_the_ranking_marks_the_recipes_own() -> None:
    lines = plan_text(PLAN).splitlines()
    title = next(place for place, line in enumerate(lines) if "layout" in line)
    assert [line.split()[0] for line in lines[title + 1 : title + 4]] == ["1", "2", "own"]
    assert [line for line in lines if line.endswith("<- the recipe's")] == [lines[title + 3]]
    assert lines[title + 4] == (
        "the recipe's own layout takes 25.0% longer than the first; by formula it is number 17 of "
        "the 6,789 that fit"
    )
    assert "simulation" in lines[title + 1]
    assert "formula" in lines[title + 3]
    same = replace(PLAN, given=SECOND)
    marked = [line for line in plan_text(same).splitlines() if line.endswith("<- the recipe's")]
    assert len(marked) == 1
    assert marked[0].startswith("2  TP 4")
    assert "not among them: 3 does not divide 4" in plan_text(without())


def test_the_runner_up_lost_by_parts_that_sum_to_the_difference() -> None:
    text = plan_text(PLAN)
    assert "why TP 4, PP 1, DP 4, micro-batch 2: +0.200 s a step (+5.0%)" in text
    assert (
        "  pipeline bubble -0.500 s, tensor-parallel communication +0.400 s, matrix products "
        "+0.300 s"
    ) in text
    assert "schedule 1f1b instead of interleaved_1f1b, recompute full instead of none" in text
    assert "holds 2.00GiB less on its fullest stage" in text


def test_layouts_that_are_too_near_are_said() -> None:
    assert "tells apart" not in plan_text(PLAN)
    near = replace(SECOND, step_s=4.03)
    assert "1 to 2 are within 1% of each other" in plan_text(replace(PLAN, ranked=(BEST, near)))
    assert "of them 2 holds least" in plan_text(replace(PLAN, ranked=(BEST, near)))


def test_how_sure_and_how_far() -> None:
    text = plan_text(PLAN)
    assert (
        "how sure: step time within 4.1% for nine of ten of 9 rows of runs of this project on "
        "H200s, bias -1.2%; 16 GPUs are 4 times the largest of them (4): an extrapolation"
    ) in text
    none = replace(PLAN, confidence=Confidence(None, 0.0, 0, 0, "data sheets"))
    assert "no measured step was ever compared on cluster 'h200'" in plan_text(none)
    assert "+-" not in plan_text(none).splitlines()[1]
    assert "12,345 legal layouts in 1.2 s: 6,789 fit in 130.66GiB a GPU, 2 were" in text


def test_a_job_that_never_ends_is_said() -> None:
    training = PLAN.training
    assert training is not None
    text = plan_text(replace(PLAN, training=replace(training, ettr=0.0)))
    assert "with them it never ends" in text


def test_json_has_every_number() -> None:
    data = json.loads(plan_json(PLAN))
    assert data["predicted"] is True
    first = data["ranked"][0]
    assert first["step_s"] == sum(first["parts_s"].values()) == BEST.step_s
    assert first["layout"]["virtual"] == 2
    assert "parallelism.virtual_pipeline_size=2" in first["set"]
    assert data["given"]["place"] == 17
    assert data["training"]["cost"] == 2.5 * 16e5 / 3600.0
    assert data["tokens_per_s"] == 16_000.0
    assert data["confidence"]["largest"] == 4
    assert json.loads(plan_json(without()))["training"] is None
