"""The lines of the target table that are about several cases: means, worst cases, shares.

Pure: rows in, numbers out. The rows are the newest of each case in the results' file, so several
runs, each of a part of the grid, add up to one table. A line without rows has no number: a miss.

The gap that is closed is the overlap efficiency of `targets.py`. A case that closes nothing counts
0.01 in its geometric mean, because a mean with zero or less is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megascale.flux.bench.targets import (
    FEW,
    LARGE,
    MIDDLE,
    NOT_OURS,
    Target,
    best_alternative,
    efficiency,
    is_attention,
)

LEAST_CLOSED = 0.01

Row = Mapping[str, Any]


class Quantity(NamedTuple):
    """A number of each row, None where it has none, and its name in the results."""

    metric: str
    of: Callable[[Row], float | None]


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def _efficiency(row: Row) -> float | None:
    return efficiency(row["value"], row["baselines"]["gemm"], row["baselines"]["nccl"])


def _closed(row: Row) -> float | None:
    hidden = _efficiency(row)
    return None if hidden is None else max(hidden, LEAST_CLOSED)


def _engine(row: Row) -> float | None:
    own_ms = row.get("own_gemm_ms")
    return None if own_ms is None else row["baselines"]["gemm"] / own_ms


def _over_best_view(row: Row) -> float | None:
    view_ms = row.get("view_ms")
    return None if view_ms is None else best_alternative(row["baselines"], views=True) / view_ms


OVER_GEMM = Quantity("T/T_gemm", lambda row: row["value"] / row["baselines"]["gemm"])
EFFICIENCY = Quantity("efficiency", _efficiency)
CLOSED = Quantity("efficiency", _closed)
BEST_OVER = Quantity("T_best/T", lambda row: best_alternative(row["baselines"]) / row["value"])
VIEW_OVER = Quantity("T_best_view/T_view", _over_best_view)
NCCL_OVER = Quantity("T_nccl/T", lambda row: row["baselines"]["nccl"] / row["value"])
ENGINE = Quantity("T_gemm/T_own_gemm", _engine)
HOST = Quantity("us", lambda row: row.get("host_us"))
OURS = Quantity("fraction", lambda row: float(row["chosen"] not in NOT_OURS))
KERNEL = Quantity("fraction", lambda row: float(row["chosen"] in ("fused", "few_rows")))


class Rows(NamedTuple):
    """Which rows a line is about: of a number of rows m, and of a kind of layer."""

    lowest: int = 0
    below: float = math.inf
    attention: bool | None = None
    with_all_reduce: bool = True

    def counts(self, row: Row) -> bool:
        case = row["case"]
        kind = self.attention is None or is_attention(case["shape"]) == self.attention
        op = self.with_all_reduce or case["op"] != "gemm_ar"
        return self.lowest <= case["m"] < self.below and kind and op


ALL = Rows()
FEW_ROWS = Rows(0, FEW + 1)
MIDDLE_ROWS = Rows(MIDDLE, LARGE, None, with_all_reduce=False)
MLP = Rows(LARGE, math.inf, attention=False, with_all_reduce=False)
ATTENTION = Rows(LARGE, math.inf, attention=True, with_all_reduce=False)


class Line(NamedTuple):
    """A line: rows of one mode, a number of each, and how they become one."""

    name: str
    mode: str
    rows: Rows
    quantity: Quantity
    combine: Callable[[Sequence[float]], float]
    target: Target | None = None


def _most(value: float) -> Target:
    return {"op": "<=", "value": value}


def _least(value: float) -> Target:
    return {"op": ">=", "value": value}


LINES = (
    Line("m >= 4096, MLP, mean", "eager", MLP, OVER_GEMM, geometric_mean, _most(1.03)),
    Line("m >= 4096, MLP, worst", "eager", MLP, OVER_GEMM, max, _most(1.05)),
    Line("m >= 4096, attention, worst", "eager", ATTENTION, EFFICIENCY, min, _least(0.85)),
    Line("m >= 4096, attention, mean; aim 0.96", "eager", ATTENTION, EFFICIENCY, mean),
    Line("1024 <= m < 4096, mean", "eager", MIDDLE_ROWS, BEST_OVER, geometric_mean, _least(1.10)),
    Line("1024 <= m < 4096, worst", "eager", MIDDLE_ROWS, BEST_OVER, min, _least(1.0)),
    Line("m <= 512, gap closed, mean", "graph", FEW_ROWS, CLOSED, geometric_mean, _least(0.60)),
    Line("m <= 512, worst", "graph", FEW_ROWS, BEST_OVER, min, _least(1.0)),
    Line("m <= 512, worst of views", "graph", FEW_ROWS, VIEW_OVER, min, _least(1.0)),
    Line("m <= 512, mean", "eager", FEW_ROWS, NCCL_OVER, geometric_mean, _least(1.3)),
    Line("GEMM inside, m >= 2048, worst", "eager", Rows(2048), ENGINE, min, _least(0.98)),
    Line("host time of a fused call, worst", "eager", ALL, HOST, max, _most(60.0)),
    Line("host time of a fused call, median", "eager", ALL, HOST, statistics.median),
    Line("cases in which a form of ours is chosen", "eager", ALL, OURS, mean),
    Line("cases in which a form of ours is chosen", "graph", ALL, OURS, mean),
    Line("cases in which one kernel is chosen", "eager", ALL, KERNEL, mean),
    Line("cases in which one kernel is chosen", "graph", ALL, KERNEL, mean),
)


@dataclass(frozen=True)
class Result:
    """The number of a line, of how many cases it is, and the case that is furthest from it."""

    line: Line
    value: float
    num_cases: int
    worst: Mapping[str, Any]


def summarise(rows: Sequence[Row]) -> list[Result]:
    """The lines that have rows, in the order of the table."""
    found = []
    for line in LINES:
        counted = [r for r in rows if r["case"]["mode"] == line.mode and line.rows.counts(r)]
        numbers = [(line.quantity.of(row), row["case"]) for row in counted]
        known = [(number, case) for number, case in numbers if number is not None]
        if not known:
            continue
        at_most = line.target is not None and line.target["op"] == "<="
        worst = (max if at_most else min)(known, key=lambda item: item[0])[1]
        value = line.combine([number for number, _ in known])
        found.append(Result(line, value, len(known), worst))
    return found
