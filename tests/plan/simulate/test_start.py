"""`megascale simulate` as a person and a program meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megascale.cli import app
from megascale.errors import ConfigError
from megascale.plan.simulate import start
from megascale.plan.validate.replay import replay
from megascale.units import format_bytes

RECIPES = Path(__file__).parents[3] / "recipes"
SMALL = [
    "parallelism.tensor_parallel_size=2",
    "parallelism.pipeline_parallel_size=2",
    "parallelism.virtual_pipeline_size=2",
    "training.global_batch_size=8",
]


def _start(recipe: Path | None = RECIPES / "bench-175b-4l.toml", **given: Any) -> str:
    settings: dict[str, Any] = {
        "overrides": SMALL,
        "cluster": "h200",
        "gpus": 8,
        "paper": None,
        "trace": None,
        "as_json": False,
        **given,
    }
    return start.start_simulation(recipe, settings.pop("overrides"), **settings)


def test_the_text_says_what_is_simulated_and_where_the_time_goes() -> None:
    lines = _start().splitlines()
    document = json.loads(_start(as_json=True))
    assert lines[0].startswith(f"step {document['step_s']:.3f} s   MFU {document['mfu']:.1%}")
    assert lines[1] == "  TP 2, PP 2 x 2, DP 2, micro-batch 1, 4 micro-batches"
    assert lines[3].endswith("'h200'; not measured")
    assert lines[5].startswith("  without slow nodes, late launches and fixed costs")
    assert document["effects_of_scale"] is False
    title = next(i for i, line in enumerate(lines) if line.split()[:2] == ["stage", "GEMM"])
    columns = lines[title].split()
    assert {"attention", "bubble", "DP", "update"} <= set(columns)
    for line in lines[title + 1 : title + 4]:  # two stages and their mean
        shares = [float(cell) for cell in line.split()[1:]]
        assert len(shares) == len(columns) - 1
        assert sum(shares) == pytest.approx(100.0, abs=0.01 * len(shares))
    drawn = [line.split()[-1] for line in lines if line.startswith(("  0 ", "  1 "))][-2:]
    assert [len(line) for line in drawn] == [100, 100]
    assert all(line.startswith("U") and "F" in line and "B" in line for line in drawn)


def test_the_document_adds_up() -> None:
    document = json.loads(_start(as_json=True))
    assert document["simulated"] is True
    assert document["num_devices"] == 8
    assert document["micro_batches"] == 4
    for stage in document["stages"]:
        parts = sum(value for name, value in stage.items() if name.endswith("_s"))
        assert parts == pytest.approx(document["step_s"])
    tokens = 8 * 2048 / document["step_s"]
    assert document["tokens_per_s"] == pytest.approx(tokens)
    assert [stage["chunks"] for stage in document["stages"]] == [[0, 2], [1, 3]]


def test_a_layout_that_does_not_fit_is_told() -> None:
    document = json.loads(_start(as_json=True))
    assert document["fits"]
    assert len(document["stage_bytes"]) == 2
    most = max(document["stage_bytes"])
    assert f"  memory {format_bytes(most)} on stage" in _start()
    deep = [*SMALL, "model.num_layers=96"]
    document = json.loads(_start(overrides=deep, as_json=True))
    assert not document["fits"]
    assert max(document["stage_bytes"]) > document["limit_bytes"]
    limit = format_bytes(document["limit_bytes"])
    said = f"DOES NOT FIT: needs {format_bytes(max(document['stage_bytes']))} on stage"
    assert f"{limit} may be used" in _start(overrides=deep)
    assert said in _start(overrides=deep)


def test_shares_sum_to_the_step() -> None:
    lines = _start(RECIPES / "llama3-8b.toml", overrides=[]).splitlines()
    title = next(i for i, line in enumerate(lines) if line.split()[:2] == ["stage", "GEMM"])
    shares = [float(cell) for cell in lines[title + 1].split()[1:]]
    assert min(shares) >= 0.0
    assert sum(shares) == pytest.approx(100.0, abs=0.01 * len(shares))


def test_a_trace_is_written_beside_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    assert str(path) in _start(trace=path)
    other = json.loads(path.read_text())["otherData"]
    assert other["step_s"] == json.loads(_start(as_json=True))["step_s"]
    assert other["layout"]["pipeline"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpus": 6}, "6 ranks cannot hold tensor_parallel_size 2 x pipeline_parallel_size 2 = 4"),
        ({"overrides": [*SMALL, "training.global_batch_size=6"]}, "global"),
        ({"overrides": ["parallelism.tensor_parallel_size=5"]}, "does not divide model.num_heads"),
        ({"overrides": [*SMALL, "parallelism.virtual_pipeline_size=3"]}, "cannot fill 6 chunks"),
        ({"cluster": "h2000"}, "h2000"),
        ({"gpus": 10**9}, "were asked for"),
        ({"recipe": None, "overrides": []}, "nothing to simulate was given; name a recipe"),
        ({"recipe": None}, "model.vocab_size is not known"),
        ({"recipe": Path("no.toml")}, r"no\.toml does not exist"),
        ({"trace": Path("trace.txt")}, r"must end in \.json"),
        ({"paper": "table4"}, "--paper is 'table4'; legal: table2, table3, fig9"),
        ({"paper": "fig9"}, "was given with a recipe, --set, --cluster, --gpus"),
    ],
)
def test_bad_input_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _start(**given)


def test_the_papers_ladder_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {
        "recipe": None,
        "overrides": [],
        "cluster": None,
        "gpus": None,
        "paper": "table3",
    }
    document = json.loads(_start(**told, as_json=True))
    rows = document["rows"]
    assert [row["gpus"] for row in rows] == [256] * 9
    assert [row["measured_mfu"] for row in rows] == pytest.approx(
        [0.477, 0.523, 0.533, 0.555, 0.580, 0.595, 0.612, 0.623, 0.653], abs=1e-3
    )
    for row in rows:
        assert row["error"] == pytest.approx(row["simulated_s"] / row["measured_s"] - 1)
        assert sum(row["mean_parts"].values()) == pytest.approx(row["simulated_s"])
    by_rung = {row["label"]: row["simulated_s"] for row in rows}
    assert by_rung["PP overlap"] < by_rung["TP overlap"]
    assert by_rung["DP overlap"] < by_rung["PP overlap"]
    first_two = replay("table3")[:2]
    monkeypatch.setattr(start, "replay", lambda _name: first_two)
    title, _, *lines, said = _start(**told).splitlines()
    assert title.startswith("table3, simulated on cluster 'paper'; printed: MegaScale")
    for line, row in zip(lines, rows, strict=False):
        assert f"{row['simulated_s']:.2f}  {row['error']:+.1%}" in line.replace("   ", "  ")
    assert len(lines) == 2
    assert said.startswith("error of the step time: mean ")


def test_the_verb() -> None:
    ran = CliRunner().invoke(
        app,
        [
            "simulate",
            str(RECIPES / "bench-175b-4l.toml"),
            "--gpus",
            "8",
            *(word for value in SMALL for word in ("--set", value)),
            "--json",
        ],
    )
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.output)["cluster"] == "h200"
