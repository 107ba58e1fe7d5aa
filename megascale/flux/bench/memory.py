"""Symmetric memory beside what travels through it, and whether calls leave anything behind."""

from __future__ import annotations

from itertools import cycle, islice

import torch

from megascale.flux.bench.cases import Case, Shape
from megascale.flux.bench.summary import ALL, Line, Quantity, Result, Row, mean
from megascale.flux.bench.work import Work
from megascale.flux.bench.world import World
from megascale.flux.ranks import GroupOnly
from megascale.flux.timing import slowest_rank

NUM_CALLS = 1000
_ROWS = (1, 16, 60, 128, 1000)
_SIDE = 1024


def gathered_bytes(case: Case, dtype: torch.dtype) -> int:
    """Bytes of what the call exchanges: all rows of x that is gathered, or of y that is summed."""
    width = case.local.k if case.op == "ag_gemm" else case.local.n
    return case.problem(dtype).rows_a_rank * case.tp * width * dtype.itemsize


def memory_lines(world: World, largest_bytes: int, dtype: torch.dtype) -> list[Result]:
    """The lines of the table about memory; none without symmetric memory. All ranks together."""
    if isinstance(world.arena, GroupOnly):
        return []
    share = Line(
        "symmetric memory over the largest activation",
        "eager",
        ALL,
        Quantity("fraction", _of_no_row),
        mean,
        {"op": "<=", "value": 4.0},
    )
    grown = share._replace(
        name=f"memory that {NUM_CALLS} calls of changing rows leave",
        quantity=Quantity("bytes", _of_no_row),
        target={"op": "<=", "value": 0.0},
    )
    held = world.symmetric_bytes() / largest_bytes
    return [Result(share, held, 1, {}), Result(grown, growth(world, dtype), 1, {})]


def _of_no_row(_row: Row) -> None:
    """These lines are measured once a run."""


def growth(world: World, dtype: torch.dtype) -> float:
    """Bytes that calls of our forms, with changing rows, add to this rank's memory; the most."""
    calls = []
    for op, parallel in (("ag_gemm", "column"), ("gemm_rs", "row")):
        shape = Shape("growth", parallel, _SIDE * world.size, _SIDE * world.size)  # type: ignore[arg-type]
        ours = [name for name in ("fused", "chunked") if name in world.offered(op)]
        for m in _ROWS:
            work = Work(Case(op, "fwd", shape, m, world.size, "eager"), world, dtype)  # type: ignore[arg-type]
            calls += [work.run(name, None) for name in ours]
    for call in calls:
        call()
    before = _held(world)
    for call in islice(cycle(calls), NUM_CALLS):
        call()
    return slowest_rank({"bytes": float(_held(world) - before)}, world.group)["bytes"]


def _held(world: World) -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(world.device) + world.symmetric_bytes()
