"""`megascale plan`: the answer holds together, and every bad input is refused before the search."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megascale.cli import app
from megascale.config import load_config
from megascale.errors import ConfigError
from megascale.plan.describe import describe
from megascale.plan.machine.load import load_cluster
from megascale.plan.machine.usable import usable_bytes
from megascale.plan.search.find import legal_space
from megascale.plan.search.fit import most_bytes
from megascale.plan.search.question import question_of
from megascale.plan.search.scale import Scale
from megascale.plan.start import start_plan

LLAMA = [
    "model.preset=llama3-8b",
    "model.num_layers=8",
    "training.global_batch_size=8",
    "training.seq_len=4096",
    "training.dtype=bfloat16",
]


def _plan(*overrides: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_json(overrides, tuple(options.items())))
    return found


@lru_cache
def _json(overrides: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> str:
    named: dict[str, Any] = {"cluster": "h200", "gpus": 8, **dict(options)}
    return start_plan(None, [*LLAMA, *overrides], as_json=True, **named)


def test_the_plan_holds_together() -> None:
    plan = _plan()
    ranked = plan["ranked"]
    assert [one["place"] for one in ranked] == list(range(1, len(ranked) + 1))
    steps = [one["step_s"] for one in ranked]
    assert steps == sorted(steps)
    for one in ranked:
        assert sum(one["parts_s"].values()) == pytest.approx(one["step_s"])
        assert max(one["stage_bytes"]) <= plan["limit_bytes"] < plan["memory_bytes"]
        layout = one["layout"]
        assert layout["tensor"] * layout["pipeline"] * layout["data"] == 8
        assert one["estimate_s"] == pytest.approx(one["step_s"], rel=0.1)
    cuts = [
        tuple(one["layout"][key] for key in ("tensor", "pipeline", "data", "micro_batch_size"))
        for one in ranked
    ]
    assert len(set(cuts)) == len(cuts)
    assert plan["tokens_per_s"] == pytest.approx(8 * 4096 / steps[0])
    search = plan["search"]
    assert search["num_legal"] >= search["num_fit"] > search["num_simulated"] > 0


def test_tokens_are_told_in_hours_and_money() -> None:
    plan = _plan("parallelism.tensor_parallel_size=8", tokens=1e9, price=2.0, max_tensor=1)
    assert plan["given"]["layout"]["tensor"] == 8, "it is the recipe's, whatever is searched"
    training = plan["training"]
    assert training["gpu_hours"] == pytest.approx(8 * 1e9 / plan["tokens_per_s"] / 3600)
    assert training["cost"] == pytest.approx(2 * training["gpu_hours"])
    assert 0.9 < training["ettr"] < 1


def test_the_winner_is_taken_by_a_dry_run_with_the_memory_that_was_told() -> None:
    best = _plan()["ranked"][0]
    description = describe(load_config(None, [*LLAMA, *best["set"]]), 8)
    assert [stage.memory.total_bytes for stage in description.stages] == best["stage_bytes"]


def test_the_recipes_own_layout_is_shown_with_its_place() -> None:
    own = ["parallelism.tensor_parallel_size=8", "activation_checkpoint.mode=full"]
    plan = _plan(*own)
    given, best = plan["given"], plan["ranked"][0]
    assert given["layout"]["tensor"] == 8
    assert given["layout"]["recompute"] == "full"
    assert given["step_s"] > best["step_s"]
    assert given["place"] > 1
    text = start_plan(None, [*LLAMA, *own], cluster="h200", gpus=8)
    marked = [line for line in text.splitlines() if line.endswith("<- the recipe's")]
    assert len(marked) == 1
    assert f"{given['step_s']:.3f}" in marked[0]
    # the winner's own layout, given: it is first
    again = _plan(*best["set"])
    assert again["given"]["layout"] == again["ranked"][0]["layout"] == best["layout"]


def test_a_layout_that_is_not_legal_or_does_not_fit_is_said_and_the_rest_answered() -> None:
    plan = _plan("parallelism.tensor_parallel_size=2", "parallelism.pipeline_parallel_size=8")
    assert plan["given"] is None
    assert "8 ranks cannot hold tensor_parallel_size 2" in plan["given_problem"]
    large = _plan("training.seq_len=131072", "parallelism.tensor_parallel_size=1")
    assert large["given"] is None
    assert "needs" in large["given_problem"]
    assert "may be used" in large["given_problem"]


def test_auto_has_no_own_layout_and_the_command_starts_the_run() -> None:
    plan = _plan("parallelism.layout=auto")
    assert plan["given"] is None
    assert plan["given_problem"] is None
    assert plan["command"][0] == "megascale train RECIPE --nproc 8"
    assert plan["command"].index("--set parallelism.layout=given") > plan["command"].index(
        "--set parallelism.layout=auto"
    ), "what comes last wins"
    many = _plan("training.global_batch_size=16", gpus=16, max_tensor=2)
    assert many["command"][0] == "megascale run RECIPE --nodes 2 --procs-per-node 8"


def test_more_tensor_parallelism_only_where_it_is_asked_for() -> None:
    def largest(**options: Any) -> int:
        plan = _plan("model.num_kv_heads=32", "model.num_layers=2", gpus=16, **options)
        return max(plan["sweeps"][0]["values"])

    assert largest() == 8
    assert largest(max_tensor=16) == 16
    assert largest(max_tensor=4) == 4


def test_an_ideal_cluster_is_faster_and_says_so() -> None:
    real, ideal = (
        _plan("training.global_batch_size=16", gpus=16, max_tensor=2, scale=Scale(ideal=flag))
        for flag in (False, True)
    )
    assert ideal["ranked"][0]["step_s"] < real["ranked"][0]["step_s"]
    assert any("effects of scale, by models" in note for note in real["assumptions"])
    assert any("an ideal cluster" in note for note in ideal["assumptions"])


def test_two_searches_find_the_same() -> None:
    one = _plan()
    _json.cache_clear()
    two = _plan()
    for plan in (one, two):
        del plan["search"]["seconds"]
    assert one == two


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    ([], {"cluster": "h20O"}, r"neither a file nor a known name; known names: .*nearest: 'h200'"),
    ([], {"gpus": 12}, "nearest legal: 8 or 16"),
    ([], {"gpus": 10**7}, "ask for 1 to"),
    ([], {"tokens": 0.0}, "--tokens 0: tokens to train on are a number above 0"),
    ([], {"tokens": math.nan}, "--tokens nan"),
    ([], {"price": 2.0}, "without --tokens"),
    ([], {"price": -1.0, "tokens": 1e9}, "a price is a number, 0 or more"),
    ([], {"report": Path("no/such/folder/out.html")}, "no/such/folder does not exist; make it"),
    (["training.global_batch_size=1"], {"max_tensor": 2}, "of 1 sequence fills 8 devices: .* of 4"),
    (["model.num_heads=7", "model.head_dim=64", "model.num_kv_heads=7",
      "training.global_batch_size=3"], {}, "7 heads .* legal: a global batch of 8, or 3 devices"),
    (["model.vocab_size=null", "model.preset=null"], {}, "model.vocab_size is not known"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "options", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_bad_input_is_refused(overrides: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        _plan(*overrides, **options)


def test_nothing_to_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to plan was given; name a recipe"):
        start_plan(None, [], cluster="h200")


def test_what_fits_nowhere_says_what_is_missing_where_and_of_what() -> None:
    wide = ["model.hidden_size=8192", "model.ffn_hidden_size=65536"]
    overrides = [*LLAMA, "model.num_layers=80", *wide]
    with pytest.raises(ConfigError) as caught:
        start_plan(None, overrides, cluster="h200", gpus=16)
    text = str(caught.value)
    assert "layouts on 16 x NVIDIA H200 fits: the smallest, TP" in text
    assert "recompute full" in text
    assert "are missing. It holds" in text
    assert "main gradient" in text
    enough = int(text.split("use ")[1].split()[0])
    assert enough > 16
    for gpus, fits in ((enough, True), (enough // 2, False)):
        assert (_least_bytes(overrides, gpus) <= usable_bytes(load_cluster("h200").device)) == fits


def _least_bytes(overrides: list[str], gpus: int) -> float:
    config = load_config(None, overrides)
    question = question_of(config, gpus, devices_per_node=8, most_devices=gpus)
    return float(most_bytes(question, legal_space(question)).min())


def test_the_verb_prints_and_writes(tmp_path: Path) -> None:
    arguments = ["plan", *(word for one in LLAMA for word in ("--set", one))]
    arguments += ["--gpus", "8", "--top", "2", "--report", str(tmp_path / "out.html")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("TP ")
    assert f"written: {tmp_path / 'out.html'}" in done.output
    assert "Plotly.newPlot" in (tmp_path / "out.html").read_text(encoding="utf-8")
    told = CliRunner().invoke(app, [*arguments, "--json"])
    assert len(json.loads(told.output)["ranked"]) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["no.toml", "--validate", "--gpus", "5"], "--validate was given with recipe, --gpus;"),
        (["--validate", "--cluster", "h200"], "--validate was given with --cluster;"),
        (["--gpus", "8", "--data", "rows.csv"], "--data was given without --validate"),
    ],
)
def test_options_that_would_be_ignored_are_refused(given: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", *given])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_the_recipes_cluster_is_planned_for() -> None:
    for given, expected in ((None, "a100"), ("h200", "h200")):
        text = start_plan(
            None, [*LLAMA, "parallelism.cluster=a100"], cluster=given, gpus=8, as_json=True
        )
        assert json.loads(text)["cluster"] == expected
