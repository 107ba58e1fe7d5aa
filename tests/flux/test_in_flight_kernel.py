"""The portable relay kernel in Triton's interpreter, on ranks that share an arena.

Every element is checked against fp64, within what the roundings on its way allow.

Programs run one after another here, so a grid has one program, or one a tile: then the tiles of
each hop are done before those of the next wait.
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
from megascale.flux.gemm_reduce_scatter import one_kernel
from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter
from megascale.flux.gemm_reduce_scatter.in_flight.config import InFlightReduceScatter
from megascale.flux.gemm_reduce_scatter.in_flight.launch import gemm_reduce_scatter
from megascale.flux.tiles import rows_per_rank, shard_rows
from tests.distributed import run_ranks
from tests.flux.interpreted import ROUNDING, SUMS, WIDTHS, operand, poison_new_tensors, worst
from tests.flux.shared_arena import SharedArena, interpret_kernels

pytest.importorskip("triton")

SMALL = InFlightReduceScatter(block_m=16, block_n=32, block_k=32, group_m=2)
POINTERS = InFlightReduceScatter(block_m=16, block_n=32, block_k=32, group_m=2, tma=False)
ONE_PROGRAM, ONE_A_TILE = 1, 10**6


@dataclass(frozen=True)
class Case:
    m: int
    n: int = 40
    k: int = 48
    config: InFlightReduceScatter = SMALL
    layout: str = "NK"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    exact: bool = False


def _operands(case: Case, seed: int, rank: int) -> tuple[Tensor, Tensor]:
    own = 1000 * (rank + 1) + 10 * seed
    x_TK = operand(own, case.m, case.k, dtype=case.dtype, exact=case.exact)
    return x_TK, operand(own + 1, case.n, case.k, dtype=case.dtype, exact=case.exact)


def _wanted(case: Case, seed: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """(y, bound of its error) of this rank: what is in the relay is rounded at each hop, as is
    each partial that is added."""
    rows = slice(*shard_rows(case.m, world_size, rank))
    on_its_way = torch.zeros(rows.stop - rows.start, case.n, dtype=torch.float64)
    bound = on_its_way + SUMS * (not case.exact) + 1e-30
    rounding = 0.0 if case.exact else ROUNDING[case.dtype]
    for hop in range(1, world_size + 1):
        x_TK, w_NK = _operands(case, seed, (rank - hop) % world_size)
        partial = (x_TK.double() @ w_NK.double().t())[rows]
        on_its_way += partial
        if hop < world_size:
            bound += (partial.abs() + on_its_way.abs() + bound) * rounding
    if case.bias:
        on_its_way += operand(seed, case.n, dtype=case.dtype, exact=case.exact).double()
    return on_its_way, bound * (1 + rounding) + on_its_way.abs() * rounding


def _values(
    rank: int, world_size: int, cases: list[Case], num_sms: int, repeats: int = 3
) -> list[str]:
    """What is wrong: nothing. One case after another goes through the slots."""
    interpret_kernels()
    poison_new_tensors()
    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD, num_sms=num_sms, jitter_s=0.002)
    wrong = []
    for seed, case in enumerate(cases):
        x_TK, w_NK = _operands(case, seed, rank)
        weight = w_NK if case.layout == "NK" else w_NK.t().contiguous()
        bias = operand(seed, case.n, dtype=case.dtype, exact=case.exact) if case.bias else None
        wanted_tN, bound = _wanted(case, seed, rank, world_size)
        results = [
            gemm_reduce_scatter(
                x_TK,
                weight,
                bias,
                arena,
                layout=case.layout,  # type: ignore[arg-type]
                config=case.config,
            )
            for _ in range(repeats)
        ]
        if (error := worst(results[0], wanted_tN, bound)) > 1:
            wrong.append(f"rank {rank}, {case}: {error} times its bound")
        if not all(torch.equal(results[0], other) for other in results[1:]):
            wrong.append(f"rank {rank}, {case}: another result when repeated")
    return wrong


FAST = [
    Case(48, n=24, exact=True),
    Case(1, n=16, k=16, layout="KN"),
    Case(21, bias=True),
    Case(32, config=POINTERS, layout="KN", bias=True, dtype=torch.float16),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_values(world_size: int) -> None:
    cases = FAST if world_size == 2 else FAST[1:]
    assert run_ranks(_values, world_size, cases, ONE_PROGRAM) == [[]] * world_size


def _all_cases(config: InFlightReduceScatter, whole: bool) -> list[Case]:
    variants = [("NK", True, torch.bfloat16), ("KN", False, torch.float16)]
    return [
        *(
            Case(m, config=config, layout=layout, bias=bias, dtype=dtype)
            for number, m in enumerate((1, 2, 5, 48, 61))  # 5: the last rank of four has none
            for layout, bias, dtype in (variants if whole else [variants[number % 2]])
        ),
        Case(48, n=8, k=8, config=config, exact=True),  # less than a tile in every dimension
        Case(48, n=8, k=8, config=config, exact=True, dtype=torch.float16),
        Case(32, n=1, k=1, config=config),
        Case(50, n=72, k=200, config=config, bias=True),
        Case(32, n=33, k=40, config=config, layout="KN"),
        Case(32, n=40, k=37, config=config, layout="NK", bias=True),
    ]


@pytest.mark.full
@pytest.mark.parametrize("whole", WIDTHS)
@pytest.mark.parametrize(
    ("world_size", "num_sms", "config"),
    [
        (2, ONE_A_TILE, SMALL),
        (3, ONE_PROGRAM, SMALL),
        (3, ONE_A_TILE, POINTERS),
        (4, ONE_PROGRAM, SMALL),
    ],
)
def test_values_of_all_cases(
    world_size: int, num_sms: int, config: InFlightReduceScatter, whole: bool
) -> None:
    cases, repeats = _all_cases(config, whole), 3 if whole else 2
    wrong = run_ranks(_values, world_size, cases, num_sms, repeats, timeout_s=110)
    assert wrong == [[]] * world_size


def _beside_the_fused_form(rank: int, world_size: int) -> list[str]:
    """Calls of both forms in turn: each finds the slots as the other has left them."""
    interpret_kernels()
    from megascale.flux.gemm_reduce_scatter.launch import gemm_reduce_scatter as fused

    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD, jitter_s=0.002)
    other = FusedReduceScatter(block_m=16, block_n=32, block_k=32, group_m=2)
    wrong = []
    for seed in range(6):
        case = Case((61, 5, 32)[seed % 3], exact=world_size > 2, bias=True)
        x_TK, w_NK = _operands(case, seed, rank)
        bias = operand(seed, case.n, dtype=case.dtype, exact=case.exact)
        found = gemm_reduce_scatter(x_TK, w_NK, bias, arena, layout="NK", config=SMALL)
        wanted = fused(x_TK, w_NK, bias, arena, layout="NK", config=other)
        if not torch.equal(found, wanted):  # two ranks, or nothing to round
            wrong.append(f"rank {rank}, {case}")
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits_as_the_fused_form_where_nothing_more_is_rounded(world_size: int) -> None:
    assert run_ranks(_beside_the_fused_form, world_size) == [[]] * world_size


class _NoTurn(RuntimeError):
    pass


class _Counting:
    """An arena that says how much a call asks for."""

    rank, world_size, device = 1, 4, torch.device("cpu")

    def turn(self, num_bytes: int) -> Any:
        raise _NoTurn(num_bytes)


def test_a_call_needs_one_shard_of_symmetric_memory() -> None:
    x = torch.empty(61, 48, dtype=torch.bfloat16)
    arena: Any = _Counting()
    with pytest.raises(_NoTurn, match=str(rows_per_rank(61, 4) * 40 * 2)):
        gemm_reduce_scatter(x, x[:40], None, arena, layout="NK", config=SMALL)


def test_one_rank_takes_no_turn() -> None:
    arena: Any = SimpleNamespace(rank=0, world_size=1)
    case = Case(10)
    x_TK, w_NK = _operands(case, 0, 0)
    wanted, bound = _wanted(case, 0, 0, 1)
    y_TN = gemm_reduce_scatter(x_TK, w_NK, None, arena, layout="NK")
    assert worst(y_TN, wanted, bound) <= 1


def test_tiles_without_flags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_kernel, "NUM_FLAGS", 65)
    arena: Any = SimpleNamespace(rank=0, world_size=3)
    x = torch.empty(3 * 16 * 33, 8, dtype=torch.bfloat16)
    with pytest.raises(FluxError, match=r"need 66 flags and there are 65"):
        gemm_reduce_scatter(x, x[:16], None, arena, layout="NK", config=SMALL)


def test_a_tile_in_odd_pieces_is_refused() -> None:
    with pytest.raises(FluxError, match=r"pieces must be one of .* got 3"):
        InFlightReduceScatter(pieces=3)
