"""The portable GEMM + reduce-scatter kernel in Triton's interpreter, on ranks that share an arena.

Every element is checked against fp64, within what rounding the peers' tiles and the result allows.

Programs run one after another here, so a grid has one program, or one a tile: then all remote tiles
are done before the first own one waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter
from megascale.flux.gemm_reduce_scatter.launch import gemm_reduce_scatter
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks
from tests.flux.interpreted import ROUNDING, SUMS, operand, poison_new_tensors, worst
from tests.flux.shared_arena import SharedArena, interpret_kernels

pytest.importorskip("triton")

SMALL = FusedReduceScatter(block_m=16, block_n=32, block_k=32, group_m=2)
POINTERS = FusedReduceScatter(block_m=16, block_n=32, block_k=32, group_m=2, tma=False)
ONE_PROGRAM, ONE_A_TILE = 1, 10**6


@dataclass(frozen=True)
class Case:
    m: int
    n: int = 40
    k: int = 48
    config: FusedReduceScatter = SMALL
    layout: str = "NK"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    exact: bool = False


def _wanted(case: Case, seed: int, rank: int, world_size: int) -> tuple[Any, ...]:
    """(x, weight, bias, y, bound of its error) of this rank."""
    rows = slice(*shard_rows(case.m, world_size, rank))
    wanted = torch.zeros(rows.stop - rows.start, case.n, dtype=torch.float64)
    bound = wanted + SUMS * (not case.exact) + 1e-30
    rounding = 0.0 if case.exact else ROUNDING[case.dtype]
    operands: list[tuple[Tensor, Tensor]] = []
    for source in range(world_size):
        own = 1000 * (source + 1) + 10 * seed
        x_TK = operand(own, case.m, case.k, dtype=case.dtype, exact=case.exact)
        w_NK = operand(own + 1, case.n, case.k, dtype=case.dtype, exact=case.exact)
        operands.append((x_TK, w_NK))
        partial = (x_TK.double() @ w_NK.double().t())[rows]
        wanted += partial
        if source != rank:
            bound += partial.abs() * rounding
    bias = operand(seed, case.n, dtype=case.dtype, exact=case.exact) if case.bias else None
    if bias is not None:
        wanted += bias.double()
    x_TK, w_NK = operands[rank]
    weight = w_NK if case.layout == "NK" else w_NK.t().contiguous()
    return x_TK, weight, bias, wanted, bound * (1 + rounding) + wanted.abs() * rounding


def _values(rank: int, world_size: int, cases: list[Case], num_sms: int) -> list[str]:
    """What is wrong: nothing. One case after another goes through the slots."""
    interpret_kernels()
    poison_new_tensors()
    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD, num_sms=num_sms, jitter_s=0.002)
    wrong = []
    for seed, case in enumerate(cases):
        x_TK, weight, bias, wanted_tN, bound = _wanted(case, seed, rank, world_size)
        results = [
            gemm_reduce_scatter(
                x_TK,
                weight,
                bias,
                arena,
                layout=case.layout,  # type: ignore[arg-type]
                config=case.config,
            )
            for _ in range(2 if case.bias else 1)
        ]
        if (error := worst(results[0], wanted_tN, bound)) > 1:
            wrong.append(f"rank {rank}, {case}: {error} times its bound")
        if not torch.equal(results[0], results[-1]):
            wrong.append(f"rank {rank}, {case}: another result on the second call")
    return wrong


FAST = [
    Case(48, n=24, exact=True),
    Case(21, bias=True),
    Case(1, n=16, k=16, layout="KN"),
    Case(32, config=POINTERS, layout="KN", bias=True, dtype=torch.float16),
]


def test_values() -> None:
    assert run_ranks(_values, 2, FAST, ONE_PROGRAM) == [[]] * 2


def _all_cases(config: FusedReduceScatter, whole: bool) -> list[Case]:
    variants = [("NK", True, torch.bfloat16), ("KN", False, torch.float16)]
    return [
        *(
            Case(m, config=config, layout=layout, bias=bias, dtype=dtype)
            for number, m in enumerate((1, 2, 48, 61))
            for layout, bias, dtype in (variants if whole else [variants[number % 2]])
        ),
        Case(48, n=8, k=8, config=config, exact=True),  # less than a tile in every dimension
        Case(32, n=1, k=1, config=config),
        Case(50, n=72, k=200, config=config, bias=True),
        Case(32, n=33, k=40, config=config, layout="NK"),
        Case(32, n=33, k=40, config=config, layout="KN"),
        Case(32, n=40, k=37, config=config, layout="NK", bias=True),
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "num_sms", "config", "whole"),
    [
        (2, ONE_A_TILE, POINTERS, False),
        (3, ONE_PROGRAM, SMALL, False),
        (3, ONE_A_TILE, SMALL, False),
        *(
            pytest.param(world_size, num_sms, config, True, marks=pytest.mark.slow)
            for world_size, num_sms in ((2, ONE_A_TILE), (3, ONE_PROGRAM), (3, ONE_A_TILE))
            for config in (SMALL, POINTERS)
        ),
    ],
)
def test_values_of_all_cases(
    world_size: int, num_sms: int, config: FusedReduceScatter, whole: bool
) -> None:
    cases = _all_cases(config, whole)
    wrong = run_ranks(_values, world_size, cases, num_sms, timeout_s=110)
    assert wrong == [[]] * world_size


def _alone(rank: int, world_size: int) -> float:
    """The kernel as one rank: a GEMM. The error in units of its bound."""
    interpret_kernels()
    from megascale.flux.arena import Slot
    from megascale.flux.gemm_reduce_scatter.kernel import launch

    case = Case(50, n=72, bias=True)
    x_TK, weight, bias, wanted, bound = _wanted(case, 0, 0, 1)
    nothing = [torch.zeros(16, dtype=torch.uint8)]
    slot = Slot(0, nothing, [torch.zeros(16, dtype=torch.int32)], torch.device("cpu"))
    arena: Any = SimpleNamespace(num_sms=2, report=torch.zeros(8, dtype=torch.int64), deadline_ns=0)
    y_TN = torch.full((50, 72), float("nan"), dtype=case.dtype)
    launch(x_TK, weight, bias, y_TN, slot, arena, SMALL, "NK")
    return worst(y_TN, wanted, bound)


@pytest.mark.full
def test_one_rank_is_a_gemm() -> None:
    assert run_ranks(_alone, 1)[0] <= 1


def test_one_rank_takes_no_turn() -> None:
    arena: Any = SimpleNamespace(rank=0, world_size=1)
    x_TK, weight, bias, wanted, bound = _wanted(Case(10, bias=True), 0, 0, 1)
    y_TN = gemm_reduce_scatter(x_TK, weight, bias, arena, layout="NK")
    assert worst(y_TN, wanted, bound) <= 1


def test_tiles_without_flags_are_refused() -> None:
    arena: Any = SimpleNamespace(rank=0, world_size=2)
    weight = torch.empty(16, 8, dtype=torch.bfloat16)
    x = weight[:1].expand(16 * (NUM_FLAGS + 1), 8)
    with pytest.raises(FluxError, match=rf"need {NUM_FLAGS + 2} flags and there are {NUM_FLAGS}"):
        gemm_reduce_scatter(x, weight, None, arena, layout="NK", config=SMALL)
