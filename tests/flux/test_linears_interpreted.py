"""The spread linears through kernels and symmetric memory: forward and backward on one arena.

Ranks are gloo processes with an arena over shared files; kernels run in Triton's interpreter. A
slot is overwritten with NaNs as soon as the arena's contract allows, so a gradient that reads a
gathered tensor too late is NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux import (
    TensorOps,
    column_parallel_linear,
    problem,
    row_parallel_linear,
    row_parallel_pair,
    selection,
)
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks
from tests.flux.shared_arena import SharedArena, interpret_kernels

pytestmark = pytest.mark.full  # processes and the interpreter: half a minute together

SLOW = pytest.mark.slow
IN, FFN, PASSES = 16, 32, 3  # FFN of a rank
BF16 = 3e-2  # a chain of three products, each rounded


def _kernels_on_cpu() -> SharedArena:
    """Kernels run here: in the interpreter, over an arena that files are."""
    interpret_kernels()
    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD, jitter_s=0.002)
    vars(selection)["why_not_fused"] = lambda _group, _device: None
    vars(problem)["_kernels_can"] = lambda *_: None
    vars(selection)["Arena"] = type("Shared", (), {"of": lambda _group, _device: arena})
    return arena


def _layer(x: Tensor, weights: list[Tensor], ops: TensorOps, m: int) -> Tensor:
    up, gate, down, side, bias = weights
    a = column_parallel_linear(x, up, None, ops, num_rows=m)
    b = column_parallel_linear(x, gate, None, ops, num_rows=m)
    y = row_parallel_linear(a * b, down, bias, ops)
    return y + row_parallel_pair(a, down, b, side, None, ops)


def _weights(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = ((FFN, IN), (FFN, IN), (IN, FFN), (IN, FFN))
    drawn = [torch.randn(s, generator=generator) / s[1] ** 0.5 for s in shapes]
    return [*drawn, torch.linspace(-1, 1, IN)]


def _step(ops: TensorOps, m: int, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients after some passes on the same buffers."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first, end = shard_rows(m, world_size, rank)
    whole = torch.randn(m, IN, generator=torch.Generator().manual_seed(77))
    leaves = [t.to(dtype).requires_grad_() for t in (whole[first:end], *_weights(rank))]
    y = torch.empty(0)
    for _ in range(PASSES):
        y = _layer(leaves[0], leaves[1:], ops, m)
        y.square().sum().backward()
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(grads) == len(leaves)
    return [y.detach().float(), *(grad.float() for grad in grads)]


def _errors(rank: int, world_size: int, mode: Any, rows: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """(rows, relative error of each result against the reference form in fp32), and turns taken."""
    arena = _kernels_on_cpu()
    found = []
    for m in rows:
        wanted = _step(TensorOps.of(dist.group.WORLD, mode="reference"), m, torch.float32)
        before = arena.turns
        got = _step(TensorOps.of(dist.group.WORLD, mode=mode), m, torch.bfloat16)
        off = [
            float((a - b).norm() / b.norm()) if b.numel() else 0.0
            for a, b in zip(got, wanted, strict=True)
        ]
        found.append((m, off, arena.turns - before))
    return found


def _assert_right(world_size: int, mode: str, rows: tuple[int, ...]) -> None:
    pytest.importorskip("triton")
    for rank, found in enumerate(run_ranks(_errors, world_size, mode, rows)):
        for m, off, turns in found:
            assert max(off) < BF16, (rank, m, off)
            assert turns >= PASSES * 10, (m, turns)  # every communication took a turn


@pytest.mark.parametrize("mode", ["chunked", "fused"])
def test_forward_and_backward_by_kernels(mode: str) -> None:
    _assert_right(2, mode, (7,))


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("chunked", (12, 1)),
        ("fused", (12, 1)),
        ("auto", (7, 1)),
        *(pytest.param(mode, (12, 7, 1), marks=SLOW) for mode in ("chunked", "fused", "auto")),
    ],
)
def test_forward_and_backward_for_any_rows(mode: str, rows: tuple[int, ...]) -> None:
    _assert_right(3, mode, rows)
