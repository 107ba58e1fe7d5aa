"""GEMM + all-reduce: the reference on gloo, the forms "plain" and "fused" on a shared arena. The
form for few rows is tested in `test_few_rows.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import GemmAllReduce
from megascale.flux.symmetric.config import Sums
from tests.distributed import run_ranks
from tests.flux.shared_arena import SharedArena, interpret_kernels

K, N = 40, 72
TWO = Sums(in_band=False, shots=2)


def _operands(rank: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(31 * m + rank)
    x, weight = (torch.randn(rows, K, generator=generator).to(dtype) for rows in (m, N))
    bias = torch.randn(N, generator=torch.Generator().manual_seed(m)).to(dtype)
    return x, weight, bias


def _wanted(m: int, world_size: int, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(m, N, dtype=torch.float64)
    for rank in range(world_size):
        x, weight, _ = _operands(rank, m, dtype)
        total += x.double() @ weight.double().t()
    return total


def _reference(rank: int, world_size: int) -> None:
    from megascale.flux.gemm_all_reduce.reference import gemm_all_reduce

    for m in (1, 6):
        x, weight, bias = _operands(rank, m, torch.float64)
        wanted = _wanted(m, world_size, torch.float64)
        found = gemm_all_reduce(x, weight, bias, dist.group.WORLD)
        torch.testing.assert_close(found, wanted + bias)
        torch.testing.assert_close(gemm_all_reduce(x, weight, None, dist.group.WORLD), wanted)
        alone = gemm_all_reduce(x, weight, bias, None)
        torch.testing.assert_close(alone, x @ weight.t() + bias)


def test_the_reference_sums_and_adds_the_bias_once() -> None:
    run_ranks(_reference, 3)


def _traced(rank: int, world_size: int) -> str:
    vars(torch.compiler)["is_compiling"] = lambda: True
    operator = GemmAllReduce(dist.group.WORLD, view=True)
    with pytest.raises(FluxError) as caught:
        operator(torch.zeros(2, K), torch.zeros(N, K))
    return str(caught.value)


def test_a_view_is_not_for_compiled_programs() -> None:
    for error in run_ranks(_traced, 2):
        assert "make the operator without it for torch.compile" in error


def _forms(rank: int, world_size: int, rows: list[int]) -> list[list[int]]:
    interpret_kernels()
    from megascale.flux.gemm_all_reduce import launch, plain

    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD, 1 << 19, jitter_s=0.002)
    bits: list[list[int]] = []
    kept: list[tuple[Tensor, Tensor]] = []
    for m in rows:
        x, weight, bias = _operands(rank, m, torch.float16)
        wanted = _wanted(m, world_size, torch.float16) + bias.double()
        transposed = weight.t().contiguous()
        calls: list[Any] = [
            plain.gemm_all_reduce(x, weight, bias, arena, layout="NK"),
            launch.gemm_all_reduce(x, weight, bias, arena, layout="NK"),
            launch.gemm_all_reduce(x, transposed, bias, arena, layout="KN"),
        ]
        for view in (
            launch.gemm_all_reduce(x, weight, bias, arena, layout="NK", view=True),
            plain.gemm_all_reduce(x, weight, bias, arena, layout="NK", config=TWO, view=True),
        ):
            in_slot = any(
                d[rank].data_ptr() <= view.data_ptr() < d[rank].data_ptr() + d[rank].nbytes
                for d in (slot.data for slot in arena._slots)
            )
            assert in_slot == (world_size > 1), m
            torch.testing.assert_close(view.double(), wanted, rtol=2e-3, atol=2e-2)
        for y_TN in calls:
            kept.append((y_TN, wanted))
            bits.append(y_TN.view(torch.int16).flatten().tolist())
        assert world_size == 1 or bits[-1] == bits[-2]  # the layout changes no sum
    for y_TN, wanted in kept:  # none is a view of a slot that later calls have overwritten
        torch.testing.assert_close(y_TN.double(), wanted, rtol=2e-3, atol=2e-2)
    return bits


@pytest.mark.parametrize("world_size", [1, 2])
def test_forms_give_all_ranks_the_same_bits(world_size: int) -> None:
    first, *others = run_ranks(_forms, world_size, [1, 5])
    for other in others:
        assert other == first


@pytest.mark.full
def test_forms_of_three_ranks() -> None:
    first, *others = run_ranks(_forms, 3, [2, 7, 16], timeout_s=110)
    for other in others:
        assert other == first
