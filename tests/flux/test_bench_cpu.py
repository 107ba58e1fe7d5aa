"""The bench end to end on gloo ranks: rows, summary, exclusions, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.errors import FluxError, LaunchError
from megascale.flux import forms
from megascale.flux.bench import rank as bench_rank
from megascale.flux.bench import start, work
from megascale.flux.bench.cases import Case, Shape
from megascale.flux.bench.measure import CaseError, Measured, Offer, measure
from megascale.flux.bench.world import World
from megascale.flux.gemm_reduce_scatter.nccl import gemm_reduce_scatter as reference
from megascale.flux.ranks import GroupOnly
from megascale.flux.timing import HostTimer
from megascale.flux.tuner import Tuner
from megascale.flux.tuning_cache import TuningCache
from tests.distributed import run_ranks
from tools import tables
from tools.blocks import ROOT

SHAPES = """
[tiny-fc1]
parallel = "column"
n = 64
k = 48
[tiny-o]
parallel = "row"
n = 32
k = 64
"""


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    file = tmp_path / "shapes.toml"
    file.write_text(SHAPES)
    return file


def _options(folder: Path, **changes: Any) -> bench_rank.Options:
    shapes = [Shape("tiny-fc1", "column", 64, 48), Shape("tiny-o", "row", 32, 64)]
    values: dict[str, Any] = {
        "shapes": shapes,
        "rows": [5, 2048],
        "ops": ["ag_gemm", "gemm_rs", "gemm_ar"],
        "modes": ["eager"],
        "dtype": "float32",
        "output": str(folder / "flux.jsonl"),
        "cache": str(folder / "tuned.json"),
        "budget_s": 60.0,
        "commit": "0123456789ab",
        "command": "megascale bench flux --nproc 2",
    }
    return bench_rank.Options(**{**values, **changes})


def _run_bench(rank: int, world_size: int, dumped: str) -> tuple[bool, list[str]]:
    group = dist.group.WORLD
    assert group is not None
    world = World(rank, torch.device("cpu"), group, GroupOnly(group, torch.device("cpu")))
    said: list[str] = []
    bench = bench_rank.Bench(bench_rank.Options.parse(dumped), world)
    bench._say = said.append  # type: ignore[assignment, method-assign]
    return bench.run(), said


def test_rows_of_two_cpu_ranks(tmp_path: Path) -> None:
    results = run_ranks(_run_bench, 2, _options(tmp_path).dump())
    assert [complete for complete, _ in results] == [True, True]
    rows = tables.read_rows("flux", tmp_path)
    cases = {(r["case"]["op"], r["case"]["pass"], r["case"]["m"]): r for r in rows}
    assert sorted(cases) == [
        ("ag_gemm", "bwd", 2048),
        ("ag_gemm", "fwd", 5),
        ("ag_gemm", "fwd", 2048),
        ("gemm_ar", "fwd", 5),
        ("gemm_rs", "bwd", 2048),
        ("gemm_rs", "fwd", 5),
        ("gemm_rs", "fwd", 2048),
    ]
    for row in rows:
        assert set(row["case"]) == {"op", "pass", "shape", "m", "tp", "mode", "dtype"}
        assert (row["device"], row["num_devices"], row["commit"]) == ("cpu", 2, "0123456789ab")
        assert row["dirty"] is False
        assert row["metric"] == "ms"
        assert row["value"] == row["forms"]["nccl"] == row["baselines"]["nccl"] > 0
        assert row["baselines"]["gemm"] > 0
        assert row["chosen"] == "nccl"
        assert row["excluded"] == {}
        assert row["stats"]["rounds"] >= 5
    middle = cases["gemm_rs", "fwd", 2048]
    assert middle["target"] == {"op": "<=", "value": middle["value"]}
    assert middle["met"] is True
    assert cases["gemm_rs", "fwd", 5]["met"] is None
    lines = {row["case"]["line"]: row for row in tables.read_rows("flux-summary", tmp_path)}
    few = lines["m <= 512, mean"]
    assert few["value"] == pytest.approx(1.0)
    assert (few["met"], few["cases"]) == (False, 3), "the reference is not 1.3 times itself"
    assert len(TuningCache.load(tmp_path / "tuned.json")) == 7
    table = tables.render("flux op=ag_gemm pass=fwd show=over_nccl,chosen,efficiency", tmp_path)
    assert "| m | value | over_nccl | chosen | efficiency |" in table
    assert "All rows: op ag_gemm, pass fwd, shape tiny-fc1, tp 2, mode eager" in table


def test_when_the_budget_is_spent_the_rest_is_named(tmp_path: Path) -> None:
    output = tmp_path / "flux.jsonl"
    output.write_text("")
    options = _options(tmp_path, budget_s=1e-6)
    for complete, said in run_ranks(_run_bench, 2, options.dump()):
        assert complete, "no case was begun and left without a row"
        assert len(said) == 1
        assert "are spent of 0; not measured: ag_gemm fwd tiny-fc1 m=2048 eager, gemm_rs" in said[0]
    assert output.read_text() == "", "no case begins after it"


@pytest.mark.full
def test_the_verb(tmp_path: Path, shapes: Path) -> None:
    output = tmp_path / "new folder" / "flux.jsonl"
    what = ["--shapes", str(shapes), "--rows", "1", "--ops", "gemm_rs", "--nproc", "2"]
    where = ["--commit", "0123456789ab", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "megascale", "bench", "flux", *what, *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "gemm_rs fwd tiny-o m=1 eager: gemm 0." in result.stdout
    (row,) = tables.read_rows("flux", output.parent)
    assert row["command"] == (
        f"megascale bench flux --shapes {shapes} --rows 1 --ops gemm_rs --nproc 2"
    )


def _right(x: Any, weight: Any, bias: Any, arena: Any, *, layout: Any, config: Any = None) -> Any:
    return reference(x, weight, bias, arena, layout=layout)


def _off(x: Any, weight: Any, bias: Any, arena: Any, *, layout: Any, config: Any = None) -> Any:
    y_tN = _right(x, weight, bias, arena, layout=layout)
    if arena.rank == 1:
        y_tN[-1, -1] += 1.0
    return y_tN


def _failing(x: Any, weight: Any, bias: Any, arena: Any, *, layout: str) -> Any:
    raise RuntimeError("out of resources")


PLANTED = {"fused": _right, "chunked": _off, "plain": _failing}


def _measure(world: World, names: list[str]) -> Measured:
    case = Case("gemm_rs", "fwd", Shape("tiny-o", "row", 32, 64), 6, world.size, "eager")
    timer = HostTimer(world.group)
    tuner = Tuner(TuningCache(), world.group, timer, tune="now", num_rounds=2)
    world.offered = lambda op, asked=(): names  # type: ignore[method-assign]
    return measure(work.Work(case, world, torch.float32), world, tuner, timer, Offer())


def _planted(rank: int, world_size: int) -> list[Any]:
    def planted(op: str) -> dict[str, Any]:
        return {**forms.forms(op), **PLANTED} if op == "gemm_rs" else forms.forms(op)

    PLANTED["nccl"] = forms.forms("gemm_rs")["nccl"]
    vars(work)["forms"] = planted
    group = dist.group.WORLD
    assert group is not None
    world = World(rank, torch.device("cpu"), group, GroupOnly(group, torch.device("cpu")))
    found = _measure(world, ["nccl", "fused", "chunked", "plain"])
    reasons = {name: reason.split(" (")[0] for name, reason in found.excluded.items()}
    forms_measured = sorted(found.forms)
    PLANTED["nccl"] = _off
    with pytest.raises(CaseError) as caught:
        _measure(world, ["nccl"])
    return [forms_measured, found.chosen.name, reasons, str(caught.value).split(" (")[0]]


def test_what_is_wrong_or_fails_is_named_and_not_timed() -> None:
    first, second = run_ranks(_planted, 2)
    assert first[0] == second[0] == ["fused", "nccl"]
    assert first[1] == second[1]
    assert first[2] == {
        "chunked": "wrong on another rank",
        "plain": "fails: RuntimeError: out of resources",
    }
    assert second[2]["chunked"].startswith("relative error")
    assert first[3] == second[3] == "nccl is excluded", "a wrong baseline leaves no row"


def _never(*_: Any) -> int:
    raise AssertionError("it starts")


def _bad(options: dict[str, Any]) -> str:
    with pytest.raises(FluxError) as caught:
        start.bench_flux(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"ops": "ag_gemm,moe"}, "--ops has 'moe'; legal are ag_gemm, gemm_rs, gemm_ar"),
        ({"mode": "compiled"}, "--mode has 'compiled'; legal are eager, graph, both"),
        ({"rows": "1,x"}, "--rows is '1,x'; give positive numbers"),
        ({"rows": "0"}, "--rows is '0'; give positive numbers"),
        ({"dtype": "int8"}, "--dtype has 'int8'; legal are bfloat16, float16, float32"),
        ({"tune": "later"}, "--tune has 'later'; legal are cache, now"),
        ({"shapes": "gpt5"}, "--shapes names 'gpt5'"),
        ({"ops": "gemm_ar", "rows": "4096"}, "no case has --ops gemm_ar"),
        ({"nproc": 5}, "which 5 ranks do not divide"),
        ({"forms": "fused,nonsense"}, "--forms has 'nonsense'; legal are nccl, symm_mem, plain, "),
        ({"forms": "in_flight", "ops": "ag_gemm"}, "--forms has 'in_flight'; legal are nccl, "),
    ],
)
def test_options_that_are_none_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], complaint: str
) -> None:
    monkeypatch.setattr(start, "_run", _never)
    assert complaint in _bad(options)


@pytest.mark.parametrize("name", ["n", "k"])
@pytest.mark.parametrize("size", ["0", "-4", "2.0", "true", '"8"'])
def test_sizes_of_a_shape_are_whole_numbers_above_zero(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, size: str
) -> None:
    monkeypatch.setattr(start, "_run", _never)
    file = tmp_path / "shapes.toml"
    other = {"n": "k", "k": "n"}[name]
    file.write_text(f'[mine]\nparallel = "column"\n{name} = {size}\n{other} = 8\n')
    error = _bad({"shapes": str(file), "nproc": 2})
    assert error.startswith(f"--shapes {file}: [mine] is ")
    assert error.endswith("n and k are whole numbers, 1 or more")


@pytest.mark.parametrize("option", ["output", "cache"])
def test_a_path_that_cannot_become_a_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str
) -> None:
    monkeypatch.setattr(start, "_run", _never)
    error = _bad({option: tmp_path, "nproc": 2})
    assert error == f"--{option} {tmp_path} is a folder; give a file, such as {tmp_path / 'NAME'}"
    file = tmp_path / "file"
    file.write_text("")
    error = _bad({option: file / "new" / "flux.jsonl", "nproc": 2})
    assert f"lies below {file}, which is a file" in error
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != tmp_path)
    error = _bad({option: tmp_path / "new" / "flux.jsonl", "nproc": 2})
    assert error.endswith(f"cannot be written: no permission for {tmp_path}")


@pytest.mark.full
def test_a_rank_that_fails_ends_the_run_and_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shapes: Path
) -> None:
    dump = bench_rank.Options.dump
    started: list[int] = []

    def corrupt(options: bench_rank.Options) -> str:
        started.append(1)
        return dump(options) if len(started) == 1 else "{not json"

    monkeypatch.setattr(bench_rank.Options, "dump", corrupt)
    with pytest.raises(
        LaunchError, match=r"rank 1 of 2 ended with 1\nrank 1's log ends:"
    ) as caught:
        start.bench_flux(shapes=str(shapes), nproc=2, output=tmp_path / "flux.jsonl")
    assert "JSONDecodeError" in str(caught.value)


def test_options_survive_the_way_to_a_rank() -> None:
    options = bench_rank.Options(
        shapes=[Shape("a", "row", 8, 4)],
        rows=[1, 2],
        ops=["gemm_rs"],
        modes=["eager", "graph"],
        dtype="float16",
        output="x.jsonl",
        budget_s=3.5,
        forms=["fused"],
        num_configs=2,
    )
    assert bench_rank.Options.parse(options.dump()) == options
    assert options.torch_dtype is torch.float16
    assert json.loads(options.dump())["rows"] == [1, 2]
