"""Two products in one GEMM + reduce-scatter on the GPUs that are there: values, bitwise again."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux import FluxMode, GemmReduceScatter
from megascale.flux.tiles import shard_rows
from megascale.flux.values import mismatch
from tests.distributed import run_ranks
from tests.flux.gpu_cases import settle

MODES: tuple[FluxMode, ...] = ("auto", "fused", "chunked", "reference")
ROWS = (1, 100, 1000, 4097)
N, K, J = 776, 520, 1096  # reductions that no step divides


def _drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device="cuda")
    return (numbers / shape[-1] ** 0.25).to(dtype)


def _of(rank: int, m: int, layout: str, dtype: torch.dtype) -> list[Tensor]:
    """a, A, b, B of a rank."""
    seed = 1000 * rank + m
    a, b = (_drawn(seed + i, m, k, dtype=dtype) for i, k in enumerate((K, J)))
    weights = [_drawn(seed + 10 + i, N, k, dtype=dtype) for i, k in enumerate((K, J))]
    if layout == "KN":
        weights = [weight.t().contiguous() for weight in weights]
    return [a, weights[0], b, weights[1]]


def _pairs(rank: int, world_size: int) -> list[str]:
    failures = []
    for m, layout, dtype in itertools.product(ROWS, ("NK", "KN"), (torch.bfloat16, torch.float16)):
        bias = _drawn(7, N, dtype=dtype) if layout == "NK" else None
        wanted = torch.zeros(m, N, device="cuda")
        for r in range(world_size):
            a, first_weight, b, second_weight = _of(r, m, layout, dtype)
            for x, weight in ((a, first_weight), (b, second_weight)):
                wanted += x.float() @ (weight.t() if layout == "NK" else weight).float()
        if bias is not None:
            wanted += bias.float()
        first, end = shard_rows(m, world_size, rank)
        for mode in MODES:
            scatter = GemmReduceScatter(dist.group.WORLD, mode=mode)
            a, first_weight, b, second_weight = _of(rank, m, layout, dtype)
            found = [
                scatter.pair(a, first_weight, b, second_weight, bias, weight_layout=layout)
                for _ in range(6)
            ]
            problem = mismatch([found[-1]], [wanted[first:end]], dtype)
            if problem:
                failures.append(f"rank {rank}, {mode}, {m}, {layout}, {dtype}: {problem}")
            if mode != "reference" and not all(torch.equal(y, found[0]) for y in found):
                failures.append(f"rank {rank}, {mode}, {m}, {layout}, {dtype}: does not repeat")
    settle()
    return failures


@pytest.mark.multi_gpu
@pytest.mark.timeout(240)
def test_two_products_are_summed_once() -> None:
    found = run_ranks(_pairs, torch.cuda.device_count(), cuda=True, timeout_s=230)
    assert [line for lines in found for line in lines] == []
