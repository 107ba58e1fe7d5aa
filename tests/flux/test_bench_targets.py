"""Targets of rows and of means over rows, against the issue's table worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.errors import FluxError
from megascale.flux.bench.cases import ROWS, SHAPES, Case, Shape, grid, shapes_of
from megascale.flux.bench.summary import LINES, geometric_mean, mean, summarise
from megascale.flux.bench.targets import (
    best_alternative,
    case_target,
    efficiency,
    is_attention,
    is_met,
)

BASELINES = {"gemm": 1.0, "nccl": 1.5, "symm_mem": 1.4}


def _case(m: int, shape: str = "llama70b-o", mode: str = "eager", op: str = "gemm_rs") -> Any:
    return {
        "op": op,
        "pass": "fwd",
        "shape": shape,
        "m": m,
        "tp": 2,
        "mode": mode,
        "dtype": "bfloat16",
    }


@pytest.mark.parametrize(
    ("case", "target_ms"),
    [
        (_case(4096, "gpt3-fc1"), 1.05),  # 1.05 T_gemm
        (_case(16384, "llama70b-fc2"), 1.05),
        (_case(4096, "llama70b-o"), 1.075),  # efficiency 0.85 of a gap of 0.5
        (_case(8192, "llama70b-qkv"), 1.075),
        (_case(1024), 1.4),  # T_best
        (_case(2048, "gpt3-fc1"), 1.4),
        (_case(512, mode="graph"), 1.4),
        (_case(1, "gpt3-fc1", "graph"), 1.4),
        (_case(512), None),  # only the mean over cases has a target
        (_case(1024, mode="graph"), None),
        (_case(8192, mode="graph"), None),
    ],
)
def test_the_target_of_a_case(case: Any, target_ms: float | None) -> None:
    target = case_target(case, BASELINES)
    assert target == (
        None if target_ms is None else {"op": "<=", "value": pytest.approx(target_ms)}
    )


def test_the_best_alternative_is_the_best_of_those_that_are_not_ours() -> None:
    assert best_alternative(BASELINES) == 1.4
    assert best_alternative({"gemm": 1.0, "nccl": 1.5, "one_shot": 1.3, "symm_mem": None}) == 1.3
    others = {"gemm": 1.0, "nccl": 1.5, "two_shot": 1.4, "two_shot_in_place": 1.2}
    assert best_alternative(others) == 1.4  # a tensor of its own
    assert best_alternative(others, views=True) == 1.2


@pytest.mark.parametrize(
    ("value", "target", "met"),
    [
        (1.0, {"op": "<=", "value": 1.0}, True),
        (1.01, {"op": "<=", "value": 1.0}, False),
        (1.0, {"op": ">=", "value": 1.0}, True),
        (0.99, {"op": ">=", "value": 1.0}, False),
        (1.0, None, None),
    ],
)
def test_whether_a_target_is_met(value: float, target: Any, met: bool | None) -> None:
    assert is_met(value, target) is met


def test_overlap_efficiency() -> None:
    assert efficiency(1.0, 1.0, 1.5) == 1.0
    assert efficiency(1.5, 1.0, 1.5) == 0.0
    assert efficiency(1.1, 1.0, 1.5) == pytest.approx(0.8)
    assert efficiency(2.0, 1.0, 1.5) == -1.0
    assert efficiency(0.9, 1.0, 1.5) == pytest.approx(1.2), "our GEMM may be the better one"
    assert efficiency(1.0, 1.0, 1.0) is None, "nothing was exposed"


def _row(case: Any, value: float, chosen: str = "fused", **more: Any) -> Any:
    return {"case": case, "value": value, "baselines": BASELINES, "chosen": chosen, **more}


def _numbers(rows: list[Any]) -> dict[tuple[str, str], float]:
    return {(found.line.name, found.line.mode): found.value for found in summarise(rows)}


def test_lines_over_large_cases() -> None:
    rows = [
        _row(_case(4096, "gpt3-fc1"), 1.02, own_gemm_ms=0.8),
        _row(_case(8192, "llama70b-fc2"), 1.08, host_us=40.0, own_gemm_ms=1.25),
        _row(_case(8192, "gpt3-fc2", op="gemm_ar"), 9.0),  # inference: no line for it here
        _row(_case(8192, "llama70b-o"), 1.1, "nccl", host_us=55.0),
        _row(_case(8192, "llama70b-qkv"), 1.05),
    ]
    found = {(f.line.name, f.line.mode): f for f in summarise(rows)}
    geometric = found["m >= 4096, MLP, mean", "eager"]
    assert geometric.value == pytest.approx((1.02 * 1.08) ** 0.5)
    assert geometric.num_cases == 2
    worst = found["m >= 4096, MLP, worst", "eager"]
    assert (worst.value, worst.worst["shape"]) == (1.08, "llama70b-fc2")
    attention = found["m >= 4096, attention, worst", "eager"]
    assert attention.value == pytest.approx(0.8)
    assert attention.worst["shape"] == "llama70b-o", "the smallest efficiency is the worst"
    numbers = _numbers(rows)
    assert numbers["m >= 4096, attention, mean; aim 0.96", "eager"] == pytest.approx(0.85)
    assert numbers["GEMM inside, m >= 2048, worst", "eager"] == 0.8
    assert numbers["host time of a fused call, worst", "eager"] == 55.0
    assert numbers["cases in which a form of ours is chosen", "eager"] == 0.8
    assert ("1024 <= m < 4096, mean", "eager") not in numbers, "no rows, no number"


def test_lines_over_few_rows() -> None:
    rows = [
        _row(_case(1, mode="graph"), 1.1),
        _row(_case(512, "gpt3-fc1", "graph", "gemm_ar"), 1.3, "chunked"),
        _row(_case(64), 1.0, "two_shot"),
        _row(_case(512, op="gemm_ar"), 1.25),
        _row(_case(1024, mode="graph"), 50.0),  # beyond what the lines are about
    ]
    rows[1] |= {"view_ms": 1.1}
    rows[1]["baselines"] = {**rows[1]["baselines"], "two_shot_in_place": 1.21}
    numbers = _numbers(rows)
    assert numbers["m <= 512, worst of views", "graph"] == pytest.approx(1.1)
    assert numbers["m <= 512, gap closed, mean", "graph"] == pytest.approx((0.8 * 0.4) ** 0.5)
    assert numbers["m <= 512, worst", "graph"] == pytest.approx(1.4 / 1.3)
    assert numbers["m <= 512, mean", "eager"] == pytest.approx((1.5 * 1.2) ** 0.5)
    assert numbers["cases in which a form of ours is chosen", "eager"] == 0.5
    assert numbers["cases in which one kernel is chosen", "graph"] == pytest.approx(2 / 3)


def test_lines_over_middle_cases() -> None:
    rows = [_row(_case(1024), 1.0), _row(_case(2048, "gpt3-fc2"), 1.4), _row(_case(4096), 3.0)]
    numbers = _numbers(rows)
    assert numbers["1024 <= m < 4096, mean", "eager"] == pytest.approx(1.4**0.5)
    assert numbers["1024 <= m < 4096, worst", "eager"] == pytest.approx(1.0)


def test_a_case_that_closes_nothing_weighs_and_does_not_break_the_mean() -> None:
    rows = [_row(_case(1, mode="graph"), 1.0), _row(_case(16, mode="graph"), 2.5)]
    found = _numbers(rows)["m <= 512, gap closed, mean", "graph"]
    assert found == pytest.approx((1.0 * 0.01) ** 0.5)


def test_every_line_of_the_table_has_its_target() -> None:
    targets = [(f"{t['op']} {t['value']:g}", line.mode) for line in LINES if (t := line.target)]
    assert targets == [
        ("<= 1.03", "eager"),
        ("<= 1.05", "eager"),
        (">= 0.85", "eager"),
        (">= 1.1", "eager"),
        (">= 1", "eager"),
        (">= 0.6", "graph"),
        (">= 1", "graph"),
        (">= 1", "graph"),
        (">= 1.3", "eager"),
        (">= 0.98", "eager"),
        ("<= 60", "eager"),
    ]
    assert len({(line.name, line.mode) for line in LINES}) == len(LINES)


def test_means() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert mean([1.0, 4.0]) == 2.5


def test_attention_is_told_by_the_name_of_the_shape() -> None:
    kinds = {s.name: is_attention(s.name) for group in SHAPES.values() for s in group}
    assert [name for name, attention in kinds.items() if attention] == [
        "llama70b-qkv",
        "llama70b-o",
    ]


ALL_SHAPES = shapes_of("gpt3,llama70b")


def test_the_grid_is_the_issue_s() -> None:
    cases = grid(ALL_SHAPES, ROWS, ("ag_gemm", "gemm_rs", "gemm_ar"), 2, ("eager", "graph"))
    assert len(set(cases)) == len(cases)
    forward = [c for c in cases if (c.direction, c.mode) == ("fwd", "eager")]
    assert len([c for c in forward if c.op == "ag_gemm"]) == 3 * 10
    assert len([c for c in forward if c.op == "gemm_rs"]) == 3 * 10
    assert sorted({c.m for c in forward if c.op == "gemm_ar"}) == [1, 16, 64, 128, 512]
    backward = [c for c in cases if c.direction == "bwd"]
    assert {c.m for c in backward} == {2048, 8192}
    assert len([c for c in backward if c.op == "ag_gemm"]) == 3 * 2
    assert len([c for c in backward if c.op == "gemm_rs"]) == 3 * 2
    graph = [c for c in cases if c.mode == "graph"]
    assert max(c.m for c in graph) == 1024
    assert len([c for c in graph if c.m <= 512]) == 3 * 5 * 3
    modes = [c.mode for c in cases]
    assert modes == sorted(modes), "no eager case after a capture"
    assert cases[0].m == 8192, "the most important first"
    alone = grid(ALL_SHAPES, ROWS, ("ag_gemm",), 2, ("graph",))
    assert max(c.m for c in alone) == 16384, "asked for graphs alone, all rows are measured"


def test_the_gemm_of_one_rank() -> None:
    column, row = Shape("c", "column", 96, 32), Shape("r", "row", 64, 128)
    assert Case("ag_gemm", "fwd", column, 8, 4, "eager").local == (24, 32, "NK")
    assert Case("gemm_rs", "bwd", column, 8, 4, "eager").local == (32, 24, "KN")
    assert Case("gemm_rs", "fwd", row, 8, 4, "eager").local == (64, 32, "NK")
    assert Case("ag_gemm", "bwd", row, 8, 4, "eager").local == (32, 64, "KN")
    problem = Case("gemm_rs", "fwd", row, 9, 4, "eager").problem(torch.float16)
    assert (problem.m, problem.n, problem.k, problem.rows_a_rank) == (9, 64, 32, 3)


def test_a_shape_that_the_ranks_do_not_divide_is_refused() -> None:
    with pytest.raises(FluxError, match="gpt3-fc1 has n 49152, which 5 ranks do not divide"):
        grid(ALL_SHAPES, ROWS, ("ag_gemm",), 5, ("eager",))


def test_names_of_shapes() -> None:
    assert [s.name for s in shapes_of("llama70b-o,gpt3,llama70b-o")] == [
        "llama70b-o",
        "gpt3-fc1",
        "gpt3-fc2",
    ]
    with pytest.raises(
        FluxError, match="--shapes names 'gpt4'; legal are gpt3, llama70b, gpt3-fc1"
    ):
        shapes_of("gpt4")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[a]\nn = 1", r"\[a\] must have k, n, parallel"),
        ("a = 1", r"\[a\] must have k, n, parallel"),
        ('[a]\nparallel = "both"\nn = 1\nk = 1', "parallel is 'column' or 'row'"),
        ('[a]\nparallel = "row"\nn = 1.5\nk = 1', "n and k are whole numbers"),
        ("", "has no shape"),
        ("[", "cannot be read"),
    ],
)
def test_a_file_of_shapes_that_is_none(tmp_path: Any, text: str, complaint: str) -> None:
    file = tmp_path / "shapes.toml"
    file.write_text(text)
    with pytest.raises(FluxError, match=complaint):
        shapes_of(str(file))
    with pytest.raises(FluxError, match="cannot be read"):
        shapes_of(str(tmp_path / "none.toml"))
