"""The portable all-gather + GEMM kernel in Triton's interpreter, on ranks that share an arena.

Every element is checked against fp64. Integers make the products exact, so that a bit that is off
is found; random values show that accumulation is in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megascale.flux.all_gather_gemm.config import FusedAllGather
from megascale.flux.all_gather_gemm.launch import all_gather_gemm
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks
from tests.flux.interpreted import ROUNDING, SUMS, operand, poison_new_tensors, worst
from tests.flux.shared_arena import SharedArena, interpret_kernels

pytest.importorskip("triton")

SMALL = FusedAllGather(block_m=16, block_n=32, block_k=32, group_m=2)
POINTERS = FusedAllGather(block_m=16, block_n=32, block_k=32, group_m=2, tma=False)
CHUNKS = FusedAllGather(block_m=16, block_n=32, block_k=32, group_m=3, chunks=3)


@dataclass(frozen=True)
class Case:
    m: int
    n: int = 40
    k: int = 48
    config: FusedAllGather = SMALL
    layout: str = "NK"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    num_weights: int = 1
    gathered: bool = False
    exact: bool = False


def _values(rank: int, world_size: int, cases: list[Case], num_sms: int) -> list[str]:
    """What is wrong: nothing. One case after another goes through the slots."""
    interpret_kernels()
    poison_new_tensors()
    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD, num_sms=num_sms, jitter_s=0.002)
    wrong = []
    for seed, case in enumerate(cases):
        x_TK = operand(seed, case.m, case.k, dtype=case.dtype, exact=case.exact)
        first, end = shard_rows(case.m, world_size, rank)
        weights, biases, wanted = [], [], []
        for i in range(case.num_weights):
            own = 1000 * (rank + 1) + 10 * seed + i
            n = case.n + 8 * i
            w_NK = operand(own, n, case.k, dtype=case.dtype, exact=case.exact)
            b_N = operand(-own, n, dtype=case.dtype, exact=case.exact) if case.bias else None
            weights.append(w_NK if case.layout == "NK" else w_NK.t().contiguous())
            biases.append(b_N)
            wanted.append(x_TK.double() @ w_NK.double().t() + (0 if b_N is None else b_N.double()))
        outputs, gathered = all_gather_gemm(
            x_TK[first:end].clone(),
            weights,
            biases,
            arena,
            layout=case.layout,  # type: ignore[arg-type]
            num_rows=case.m,
            gathered=case.gathered,
            config=case.config,
        )
        for y_TN, wanted_TN in zip(outputs, wanted, strict=True):
            bound = wanted_TN.abs() * ROUNDING[case.dtype] + SUMS
            if (error := worst(y_TN, wanted_TN, bound * (not case.exact) + 1e-30)) > 1:
                wrong.append(f"rank {rank}, {case}: {error} times its bound")
        if case.gathered != (gathered is not None and torch.equal(gathered, x_TK)):
            wrong.append(f"rank {rank}, {case}: gathered {gathered}")
    if int(arena.done.abs().max()):
        wrong.append(f"rank {rank}: the counter of programs was not reset: {arena.done}")
    return wrong


FAST = [
    Case(64, n=24, gathered=True, exact=True),  # tiles divide shards; below they do not
    Case(21, bias=True, config=CHUNKS),
    Case(1, n=16, k=16, layout="KN"),
    Case(32, config=POINTERS, layout="KN", bias=True),
    Case(19, n=33, k=37, config=POINTERS, num_weights=2, dtype=torch.float16),
]


@pytest.mark.full
def test_values() -> None:
    assert run_ranks(_values, 2, FAST, 3) == [[]] * 2


def _all_cases(config: FusedAllGather, whole: bool) -> list[Case]:
    variants = [("NK", True, torch.bfloat16), ("KN", False, torch.float16)]
    return [
        *(
            Case(m, config=config, layout=layout, bias=bias, dtype=dtype, gathered=bias)
            for number, m in enumerate((1, 2, 48, 61))
            for layout, bias, dtype in (variants if whole else [variants[number % 2]])
        ),
        Case(96, config=config, gathered=True, exact=True),
        Case(48, n=8, k=8, config=config, exact=True),  # less than a tile in every dimension
        Case(32, n=1, k=1, config=config),
        Case(50, n=72, k=200, config=config, num_weights=3, bias=True),
        Case(32, n=33, k=40, config=config, layout="NK"),  # descriptors of operands alone
        Case(32, n=33, k=40, config=config, layout="KN"),
        Case(32, n=40, k=37, config=config, layout="NK", bias=True),
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("world_size", "num_sms", "config", "whole"),
    [
        (2, 1, POINTERS, False),
        (2, 1, CHUNKS, False),
        (3, 5, SMALL, False),
        (3, 5, CHUNKS, False),
        *(
            pytest.param(world_size, num_sms, config, True, marks=pytest.mark.slow)
            for world_size, num_sms in ((2, 1), (3, 5))
            for config in (SMALL, POINTERS, CHUNKS)
        ),
    ],
)
def test_values_of_all_cases(
    world_size: int, num_sms: int, config: FusedAllGather, whole: bool
) -> None:
    cases = _all_cases(config, whole)
    wrong = run_ranks(_values, world_size, cases, num_sms, timeout_s=110)
    assert wrong == [[]] * world_size


def _same_as_alone(rank: int, world_size: int, config: FusedAllGather) -> tuple[Any, Any]:
    """(y of the group, y of the same kernel as one rank without flags)."""
    interpret_kernels()
    from megascale.flux.all_gather_gemm.kernel import launch

    poison_new_tensors()
    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD)
    x_TK = operand(0, 32 * world_size, 80, dtype=torch.bfloat16)
    weight = operand(rank + 1, 48, 80, dtype=torch.bfloat16)
    shard = x_TK[32 * rank : 32 * rank + 32]
    (y_TN,), _ = all_gather_gemm(shard, [weight], [None], arena, layout="NK", config=config)
    alone_TN = torch.full_like(y_TN, float("nan"))
    alone: Any = SimpleNamespace(
        rank=0, num_sms=2, done=arena.done, report=arena.report, deadline_ns=0
    )
    launch(x_TK, x_TK[None], weight, None, alone_TN, None, alone, config, "NK", x_TK.shape[0])
    return y_TN.float().numpy(), alone_TN.float().numpy()


@pytest.mark.full
@pytest.mark.parametrize("config", [SMALL, POINTERS])
def test_the_group_computes_bit_by_bit_what_the_kernel_computes_alone(
    config: FusedAllGather,
) -> None:
    for found, alone in run_ranks(_same_as_alone, 2, config):
        assert (found == alone).all()


def test_one_rank_takes_no_turn() -> None:
    arena: Any = SimpleNamespace(rank=0, world_size=1)
    x = operand(0, 10, 48, dtype=torch.bfloat16)
    weights = [operand(i, 48, 40 + i, dtype=torch.bfloat16) for i in range(2)]
    biases = [None, operand(2, 41, dtype=torch.bfloat16)]
    outputs, gathered = all_gather_gemm(x, weights, biases, arena, layout="KN", gathered=True)
    assert gathered is x
    for y, weight, bias in zip(outputs, weights, biases, strict=True):
        wanted = x.double() @ weight.double() + (0 if bias is None else bias.double())
        assert worst(y, wanted, wanted.abs() * ROUNDING[x.dtype] + SUMS) <= 1
