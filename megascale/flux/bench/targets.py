"""What a case must reach, from its measured milliseconds. Pure functions.

T is what the tuner's choice took, T_gemm cuBLAS alone on the full shape, T_nccl the backend's
collective and cuBLAS, T_best the best method that is not ours and gives a tensor of its own, as the
choice does. Methods whose result stays in symmetric memory until later calls overwrite it are
compared with each other: T_view and T_best_view. What means over cases must reach is in
`summary.py`.

| rows | T of a case |
|---|---|
| m >= 4096, MLP | <= 1.05 T_gemm |
| m >= 4096, attention | overlap efficiency 1 - (T - T_gemm) / (T_nccl - T_gemm) >= 0.85 |
| 1024 <= m < 4096 | <= T_best |
| m <= 512, in a graph | <= T_best, and T_view <= T_best_view where there are such methods |
| m <= 512, eager | only the mean has a target |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LARGE, MIDDLE, FEW = 4096, 1024, 512
_IN_PLACE = ("two_shot_in_place", "two_shot_view")
NOT_OURS = ("nccl", "symm_mem", "one_shot", "two_shot", *_IN_PLACE)

Target = dict[str, Any]


def is_attention(shape: str) -> bool:
    """Attention's projections have little work for their bytes; MLP shapes have much."""
    return shape.endswith(("-qkv", "-o"))


def efficiency(ms: float, gemm_ms: float, nccl_ms: float) -> float | None:
    """The part of the exposed communication that is hidden; None where nothing was exposed."""
    return None if nccl_ms <= gemm_ms else 1 - (ms - gemm_ms) / (nccl_ms - gemm_ms)


def best_alternative(baselines: Mapping[str, float | None], *, views: bool = False) -> float:
    """T_best, or with `views` T_best_view: milliseconds of the best method that is not ours."""
    names = [name for name in NOT_OURS if views or name not in _IN_PLACE]
    times = [baselines.get(name) for name in names]
    return min(ms for ms in times if ms is not None)


def is_few_in_graph(case: Mapping[str, Any]) -> bool:
    """A case that no alternative may win."""
    return bool(case["m"] <= FEW and case["mode"] == "graph")


def case_target(case: Mapping[str, Any], baselines: Mapping[str, float | None]) -> Target | None:
    """{"op": "<=", "value": ms} of a case, None where only a mean has a target."""
    gemm_ms, nccl_ms = baselines["gemm"], baselines["nccl"]
    assert gemm_ms is not None, baselines
    assert nccl_ms is not None, baselines
    m, graph, best_ms = case["m"], case["mode"] == "graph", best_alternative(baselines)
    if m >= LARGE and not graph:
        if is_attention(case["shape"]):
            return {"op": "<=", "value": gemm_ms + (1 - 0.85) * max(0.0, nccl_ms - gemm_ms)}
        return {"op": "<=", "value": 1.05 * gemm_ms}
    if (MIDDLE <= m < LARGE and not graph) or is_few_in_graph(case):
        return {"op": "<=", "value": best_ms}
    return None


def is_met(value: float, target: Target | None) -> bool | None:
    """Whether a value reaches its target; None without one."""
    if target is None:
        return None
    return value <= target["value"] if target["op"] == "<=" else value >= target["value"]
