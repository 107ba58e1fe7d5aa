"""What is measured: shapes of the papers' models, rows, operators, and in which order.

Shapes are those of whole layers; each of tp ranks has its part. A column-parallel weight (QKV,
FC1) is cut along n: its forward is all-gather + GEMM, the gradient of its input GEMM +
reduce-scatter with the same weight read the other way ("KN"). A row-parallel weight (projection,
FC2) is cut along k and the two change places; for inference its forward is GEMM + all-reduce.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megascale.errors import FluxError
from megascale.flux.default_rule import Mode
from megascale.flux.problem import Layout, Op, Problem

Parallel = Literal["column", "row"]
Pass = Literal["fwd", "bwd"]


@dataclass(frozen=True)
class Shape:
    """The weight of a layer, [n, k] in all, and along which of them it is cut."""

    name: str
    parallel: Parallel
    n: int
    k: int


SHAPES = {
    "gpt3": (
        Shape("gpt3-fc1", "column", 49152, 12288),
        Shape("gpt3-fc2", "row", 12288, 49152),
    ),
    "llama70b": (
        Shape("llama70b-fc1", "column", 57344, 8192),
        Shape("llama70b-fc2", "row", 8192, 28672),
        Shape("llama70b-qkv", "column", 10240, 8192),
        Shape("llama70b-o", "row", 8192, 8192),
    ),
}
OPS: tuple[Op, ...] = ("ag_gemm", "gemm_rs", "gemm_ar")
ROWS = (1, 16, 64, 128, 512, 1024, 2048, 4096, 8192, 16384)

MOST_ROWS_ALL_REDUCE = 512  # inference; above it a layer scatters
MOST_ROWS_GRAPH = 1024  # where launching dominates; above it a graph changes nothing
ROWS_BACKWARD = (2048, 8192)

# Large rows first, then decode, then what lies between: what a run that is stopped must have.
_ORDER = (8192, 4096, 2048, 64, 1024, 16384, 1, 512, 16, 128)


class Local(NamedTuple):
    """The GEMM of one rank: x [m, k] of what the operator sees, weight of n columns."""

    n: int
    k: int
    layout: Layout


@dataclass(frozen=True)
class Case:
    """One row of the results, all but the dtype."""

    op: Op
    direction: Pass
    shape: Shape
    m: int
    tp: int
    mode: Mode

    @property
    def local(self) -> Local:
        """Columns and reduction of one rank's weight."""
        n, k = self.shape.n, self.shape.k
        if self.shape.parallel == "column":
            n //= self.tp
        else:
            k //= self.tp
        return Local(n, k, "NK") if self.direction == "fwd" else Local(k, n, "KN")

    def problem(self, dtype: torch.dtype) -> Problem:
        n, k, layout = self.local
        return Problem(self.op, self.m, n, k, self.tp, dtype, layout)

    def keys(self, dtype: torch.dtype) -> dict[str, Any]:
        """The case of its row."""
        return {
            "op": self.op,
            "pass": self.direction,
            "shape": self.shape.name,
            "m": self.m,
            "tp": self.tp,
            "mode": self.mode,
            "dtype": str(dtype).removeprefix("torch."),
        }

    def __str__(self) -> str:
        return f"{self.op} {self.direction} {self.shape.name} m={self.m} {self.mode}"


def shapes_of(names: str) -> list[Shape]:
    """Shapes of a list such as "gpt3,llama70b-o", or of a TOML file.

    A table a shape: [my-fc1] parallel = "column", n = 4096, k = 1024.
    """
    if names.endswith(".toml"):
        return _from_file(Path(names))
    known = {shape.name: (shape,) for group in SHAPES.values() for shape in group}
    found: list[Shape] = []
    for name in names.split(","):
        group = SHAPES.get(name) or known.get(name)
        if group is None:
            legal = ", ".join([*SHAPES, *known])
            raise FluxError(f"--shapes names {name!r}; legal are {legal}, or a file NAME.toml")
        found += [shape for shape in group if shape not in found]
    return found


def _from_file(path: Path) -> list[Shape]:
    try:
        tables = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FluxError(f"--shapes {path} cannot be read: {error}") from None
    found = []
    for name, table in tables.items():
        wanted = {"parallel", "n", "k"}
        if not isinstance(table, dict) or set(table) != wanted:
            raise FluxError(f"--shapes {path}: [{name}] must have {', '.join(sorted(wanted))}")
        shape = Shape(name, **table)
        sizes = (shape.n, shape.k)
        sizes_fit = all(type(size) is int and size > 0 for size in sizes)
        if shape.parallel not in ("column", "row") or not sizes_fit:
            raise FluxError(
                f"--shapes {path}: [{name}] is {asdict(shape)}; parallel is 'column' or 'row', n "
                "and k are whole numbers, 1 or more"
            )
        found.append(shape)
    if not found:
        raise FluxError(f"--shapes {path} has no shape; give a table such as [my-fc1]")
    return found


def grid(
    shapes: Sequence[Shape],
    rows: Sequence[int],
    ops: Sequence[Op],
    tp: int,
    modes: Sequence[Mode],
) -> list[Case]:
    """All cases, eager ones first: after a capture an eager call of the arena costs a barrier more.

    Raises FluxError for a shape that tp does not divide.
    """
    for shape in shapes:
        cut = shape.n if shape.parallel == "column" else shape.k
        if cut % tp:
            name = "n" if shape.parallel == "column" else "k"
            raise FluxError(f"{shape.name} has {name} {cut}, which {tp} ranks do not divide")
    ordered = sorted(rows, key=lambda m: (_ORDER.index(m) if m in _ORDER else len(_ORDER), m))
    return [
        case
        for mode in sorted(modes)
        for m in ordered
        for direction, shape in itertools.product(_PASSES, shapes)
        for case in _cases(shape, m, direction, tp, mode)
        if case.op in ops and (mode == "eager" or len(modes) == 1 or m <= MOST_ROWS_GRAPH)
    ]


_PASSES: tuple[Pass, ...] = ("fwd", "bwd")


def _cases(shape: Shape, m: int, direction: Pass, tp: int, mode: Mode) -> list[Case]:
    gathers = (shape.parallel == "column") == (direction == "fwd")
    ops: list[Op] = ["ag_gemm" if gathers else "gemm_rs"]
    if direction == "bwd" and (m not in ROWS_BACKWARD or mode == "graph"):
        return []
    if direction == "fwd" and shape.parallel == "row" and m <= MOST_ROWS_ALL_REDUCE:
        ops.append("gemm_ar")
    return [Case(op, direction, shape, m, tp, mode) for op in ops]
