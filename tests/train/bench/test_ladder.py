"""The ladder as data: what each rung sets, in which layout, and what it is refused for."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megascale.config import load_config
from megascale.errors import ConfigError
from megascale.topology import Mesh
from megascale.train.bench.ladder import (
    LADDER,
    plan_ladder,
    settings_of,
    why_left_out,
)
from tests.train.bench.planted import PP2, TINY, TP2, plan_tiny, write_tiny
from tools.blocks import ROOT

RUNG = {rung.name: rung for rung in LADDER}


def test_the_rungs_are_those_of_the_paper_in_its_order() -> None:
    assert [(rung.name, rung.section) for rung in LADDER] == [
        ("baseline", "6.1"),
        ("parallel block", "3.1"),
        ("sliding window", "3.1"),
        ("TP overlap", "3.2"),
        ("PP overlap", "3.2"),
        ("DP overlap", "3.2"),
        ("efficient operators", "3.3"),
        ("misc", "6.1"),
        ("LAMB 3x batch", "3.1"),
    ]
    assert math.fsum(rung.paper_gain or 0.0 for rung in LADDER) == pytest.approx(0.653 - 0.477)
    assert all(rung.settings for rung in LADDER), "each is a switch"
    assert [rung.name for rung in LADDER if rung.same_mathematics] == [
        "TP overlap",
        "PP overlap",
        "DP overlap",
        "efficient operators",
        "misc",
    ]


def test_the_baseline_turns_off_what_the_rungs_turn_on() -> None:
    baseline = LADDER[0].settings
    for rung in LADDER[1:]:
        for key, value in rung.settings.items():
            if key != "training.global_batch_size":
                assert baseline[key] != value, (rung.name, key)
    assert set(baseline) == {key for rung in LADDER[1:] for key in rung.settings} - {
        "training.global_batch_size"
    }


@pytest.mark.parametrize(("seq_len", "window"), [(2048, 768), (8192, 3072), (16, 6), (2, 1)])
def test_window_and_batch_follow_the_recipe(seq_len: int, window: int) -> None:
    overrides = [f"training.seq_len={seq_len}", "training.global_batch_size=7"]
    config = load_config(None, overrides)
    assert settings_of(RUNG["sliding window"], config) == (f"model.attention_window={window}",)
    assert settings_of(RUNG["LAMB 3x batch"], config) == (
        "optimizer.name=lamb",
        "training.global_batch_size=21",
    )


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "left_out"),
    [
        ([], 1, {"TP overlap": "tensor", "PP overlap": "pipeline", "DP overlap": "data"}),
        ([], 2, {"TP overlap": "tensor", "PP overlap": "pipeline"}),
        ([TP2], 2, {"PP overlap": "pipeline", "DP overlap": "data"}),
        ([PP2], 4, {"TP overlap": "tensor"}),
        ([TP2, PP2], 4, {"DP overlap": "data"}),
        ([TP2, PP2], 8, {}),
    ],
)
def test_a_rung_that_means_nothing_in_the_layout_is_left_out_by_name(
    tmp_path: Path, overrides: list[str], num_ranks: int, left_out: dict[str, str]
) -> None:
    planned = plan_tiny(tmp_path, *overrides, num_ranks=num_ranks)
    assert [plan.rung for plan in planned] == list(LADDER)
    reasons = {plan.rung.name: plan.left_out for plan in planned if plan.left_out}
    assert reasons == {
        name: f"not in this layout: one rank along the {axis} axis"
        for name, axis in left_out.items()
    }
    assert all((plan.case is None) == (plan.left_out is not None) for plan in planned)


def test_each_rung_adds_its_switches_to_those_below(tmp_path: Path) -> None:
    planned = plan_tiny(tmp_path, TP2, PP2, "training.global_batch_size=8", num_ranks=8)
    cases = {plan.rung.name: plan.case for plan in planned if plan.case is not None}
    seen = {}
    for name, case in cases.items():
        keys, switches = case.keys, case.switches
        seen[name] = (
            *(keys["block"], switches["window"], keys["flux"], switches["transfers"]),
            *(switches["dp_overlap"], switches["operators"], switches["host"]),
            *(case.config.data.prefetch, switches["optimizer"], keys["gbs"]),
        )
    plain = ("plain", "waits", 0, "adamw", 8)
    assert seen == {
        "baseline": ("serial", None, "reference", "coupled", "no", *plain),
        "parallel block": ("parallel", None, "reference", "coupled", "no", *plain),
        "sliding window": ("parallel", 6, "reference", "coupled", "no", *plain),
        "TP overlap": ("parallel", 6, "auto", "coupled", "no", *plain),
        "PP overlap": ("parallel", 6, "auto", "decoupled", "no", *plain),
        "DP overlap": ("parallel", 6, "auto", "decoupled", "yes", *plain),
        "efficient operators": (
            *("parallel", 6, "auto", "decoupled", "yes", "fused", "waits", 0, "adamw", 8),
        ),
        "misc": ("parallel", 6, "auto", "decoupled", "yes", "fused", "ahead", 2, "adamw", 8),
        "LAMB 3x batch": (
            *("parallel", 6, "auto", "decoupled", "yes", "fused", "ahead", 2, "lamb", 24),
        ),
    }
    mathematics = {plan.rung.name: plan.mathematics for plan in planned if plan.case is not None}
    assert mathematics == {
        **{name: name for name in cases},
        **dict.fromkeys(list(cases)[3:8], "sliding window"),
    }


def test_the_baseline_takes_back_what_the_recipe_has_of_the_ladder(tmp_path: Path) -> None:
    ours = TINY.replace("[model]", '[model]\nblock = "parallel"\nattention_window = 3')
    recipe = write_tiny(tmp_path, ours)
    first = plan_ladder(recipe, [], 1, model=None, num_gpus=0)[0]
    assert first.case is not None
    assert (first.case.keys["block"], first.case.keys["attention"]) == ("serial", "full")


def test_a_recipe_that_cannot_take_a_rung_is_refused(tmp_path: Path) -> None:
    recipe = write_tiny(tmp_path, TINY.replace("[model]", '[model]\nbias = "qkv"'))
    with pytest.raises(ConfigError) as caught:
        plan_ladder(recipe, [], 1, model=None, num_gpus=0)
    message = str(caught.value)
    assert "cannot take the rung 'parallel block'" in message
    assert "which sets model.block=parallel: model: model.bias is 'qkv'" in message
    assert "choose another recipe, or measure this one without --ablate" in message


@pytest.mark.parametrize(
    "override", ["model.block=parallel", " parallelism.flux = fused", "optimizer.name=lamb"]
)
def test_switches_of_the_ladder_are_not_the_users(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"whose rungs set .* themselves; leave it out"):
        plan_tiny(tmp_path, override, num_ranks=1)


def test_the_batch_is_the_users(tmp_path: Path) -> None:
    planned = plan_tiny(tmp_path, "training.global_batch_size=8", num_ranks=1)
    batches = [plan.case.keys["gbs"] for plan in planned if plan.case is not None]
    assert batches == [*[8] * 5, 24]


@pytest.mark.parametrize("name", ["bench-175b-4l", "bench-7b"])
def test_the_bench_recipes_take_the_whole_ladder(name: str) -> None:
    recipe = ROOT / "recipes" / f"{name}.toml"
    planned = plan_ladder(recipe, [], 2, model=None, num_gpus=2)
    windows = {plan.case.switches["window"] for plan in planned if plan.case is not None}
    assert windows == {None, 768}
    assert why_left_out(RUNG["misc"], Mesh(tensor=2)) is None
