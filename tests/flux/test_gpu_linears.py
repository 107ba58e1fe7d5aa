"""The differentiable linears on GPUs, wrong calls, a rank that never calls, and one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import AllGatherGemm, GemmAllReduce, GemmReduceScatter
from megascale.flux.autograd import TensorOps, column_parallel_linear, row_parallel_linear
from megascale.flux.tiles import shard_rows
from megascale.flux.values import mismatch
from megascale.ops.deferred import DeferredWork, deferring, run
from megascale.ops.joined import accumulate_joined
from tests.distributed import run_ranks
from tests.flux.gpu_cases import settle

MODES = ("fused", "chunked", "auto", "reference")
INPUTS, HIDDEN = 264, 520  # hidden columns of a rank


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, device="cuda")
    return (numbers / shape[-1] ** 0.25).to(dtype)


class _Mlp:
    """Two column-parallel layers of one input, whose product goes through a row-parallel one.

    In backward the two column layers follow one another: two gathers that were started early.
    """

    def __init__(self, m: int, world_size: int, dtype: torch.dtype, seed: int) -> None:
        self.m, self.world_size = m, world_size
        self.x = _drawn(seed, m, INPUTS, dtype=dtype)
        self.up = [
            [_drawn(seed + 10 + 2 * r + i, HIDDEN, INPUTS, dtype=dtype) for i in range(2)]
            for r in range(world_size)
        ]
        self.up_bias = [_drawn(seed + 100 + r, HIDDEN, dtype=dtype) for r in range(world_size)]
        self.down = [_drawn(seed + 200 + r, INPUTS, HIDDEN, dtype=dtype) for r in range(world_size)]
        self.down_bias = _drawn(seed + 300, INPUTS, dtype=dtype)
        self.grad = _drawn(seed + 301, m, INPUTS, dtype=dtype)

    def whole(self, rank: int) -> list[Tensor]:
        """By autograd in fp32 on all rows and columns: output and gradients of `rank`."""
        leaf = _leaf32
        x, up_bias, down_bias = leaf(self.x), leaf(self.up_bias[rank]), leaf(self.down_bias)
        y = down_bias.expand(self.m, -1)
        own: list[Tensor] = []
        for r in range(self.world_size):
            a, b, down = leaf(self.up[r][0]), leaf(self.up[r][1]), leaf(self.down[r])
            bias = up_bias if r == rank else self.up_bias[r].float()
            y = y + F.linear(F.linear(x, a, bias) * F.linear(x, b), down)
            own = own if r != rank else [a, b, down]
        first, end = shard_rows(self.m, self.world_size, rank)
        y.backward(self.grad.float())
        # of own rows only, as the contract says; ranks sum it like a norm's
        bias_grad = self.grad[first:end].float().sum(0)
        grads = [leaf.grad for leaf in (*own, up_bias)]
        assert x.grad is not None
        found = [y.detach()[first:end], x.grad[first:end], *grads, bias_grad]
        assert all(isinstance(t, Tensor) for t in found)
        return [t for t in found if t is not None]

    def backward(self, rank: int, ops: TensorOps, weights: list[Tensor]) -> None:
        """Gradients of these weights (up a, up b, down) by the operators."""
        first, end = shard_rows(self.m, self.world_size, rank)
        x = self.x[first:end].clone().requires_grad_()
        a, b, down = weights
        h = column_parallel_linear(x, a, self.up_bias[rank], ops, num_rows=self.m)
        h = h * column_parallel_linear(x, b, None, ops, num_rows=self.m)
        row_parallel_linear(h, down, self.down_bias, ops).backward(self.grad[first:end])

    def cut(self, rank: int, ops: TensorOps) -> list[Tensor]:
        """The same by the operators."""
        first, end = shard_rows(self.m, self.world_size, rank)
        x = self.x[first:end].clone().requires_grad_()
        a, b = (w.clone().requires_grad_() for w in self.up[rank])
        up_bias, down = (t.clone().requires_grad_() for t in (self.up_bias[rank], self.down[rank]))
        down_bias = self.down_bias.clone().requires_grad_()
        h = column_parallel_linear(x, a, up_bias, ops, num_rows=self.m)
        h = h * column_parallel_linear(x, b, None, ops, num_rows=self.m)
        y = row_parallel_linear(h, down, down_bias, ops)
        y.backward(self.grad[first:end])
        leaves = (x, a, b, down, up_bias, down_bias)
        grads = [leaf.grad for leaf in leaves]
        assert all(isinstance(grad, Tensor) for grad in grads), grads
        return [y.detach(), *(grad for grad in grads if grad is not None)]


def _leaf32(t: Tensor) -> Tensor:
    return t.float().requires_grad_()


NAMES = ("y", "x", "up a", "up b", "down", "up bias", "down bias")


def _gradients(rank: int, world_size: int) -> list[str]:
    failures = []
    for dtype in (torch.bfloat16, torch.float16):
        for m in (1, 100, 128 * world_size, 1000, 4096):
            mlp = _Mlp(m, world_size, dtype, 50_000 + m)
            wanted = mlp.whole(rank)
            for mode in MODES:
                ops = TensorOps.of(_world(), mode=mode)
                for repeat in range(3):  # back to back: turns of forward and backward alternate
                    if repeat == 1 + rank % 2:
                        torch.cuda._sleep(4_000_000)
                    found = mlp.cut(rank, ops)
                for name, one, other in zip(NAMES, found, wanted, strict=True):
                    if _far(one, other, dtype):
                        failures.append(f"rank {rank}, {mode}, {dtype}, m {m}, {name}")
    settle()
    return failures


def _far(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    """Worse than a chain of products, each rounded to this type. NaN is far."""
    limit = {torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
    return not bool((found.float() - wanted).norm() <= limit * wanted.norm())


@pytest.mark.multi_gpu
@pytest.mark.timeout(240)
def test_gradients_are_those_of_the_whole_layers() -> None:
    found = run_ranks(_gradients, torch.cuda.device_count(), cuda=True, timeout_s=230)
    assert [line for lines in found for line in lines] == []


def _deferred(rank: int, world_size: int) -> list[str]:
    """Weight gradients of three micro-batches, put off and joined: the sums of those at once."""
    failures = []
    ops = TensorOps.of(_world(), mode="auto")
    batches = [_Mlp(1024, world_size, torch.bfloat16, 60_000) for _ in range(3)]
    for number, mlp in enumerate(batches):  # of the same weights
        mlp.x = _drawn(70_000 + number, mlp.m, INPUTS, dtype=torch.bfloat16)
    at_once = [mlp.cut(rank, ops) for mlp in batches]
    wanted = [torch.stack([found[i].float() for found in at_once]).sum(0) for i in (2, 3, 4)]
    for keeps in (False, True):
        weights = [w.clone() for w in (*batches[0].up[rank], batches[0].down[rank])]
        for weight in weights:
            weight.requires_grad_()
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
        works = []
        for mlp in batches:
            works.append(DeferredWork(keeps_gathered=keeps))
            with deferring(works[-1]):
                mlp.backward(rank, ops, weights)
        run(works, accumulate_joined)
        for name, weight, total in zip(NAMES[2:], weights, wanted, strict=False):
            found = weight.main_grad  # type: ignore[attr-defined]
            if not bool((found - total).norm() <= 1e-2 * total.norm()):
                failures.append(f"rank {rank}, keeps {keeps}, {name}")
    settle()
    return failures


@pytest.mark.multi_gpu
@pytest.mark.timeout(120)
def test_deferred_weight_gradients_are_those_at_once() -> None:
    found = run_ranks(_deferred, torch.cuda.device_count(), cuda=True, timeout_s=110)
    assert [line for lines in found for line in lines] == []


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except FluxError as error:
        return str(error)
    return "was not refused"


def _wrong_calls(rank: int, world_size: int) -> dict[str, str]:
    """Every rank refuses, nothing is launched, and a right call follows."""
    ops = TensorOps.of(_world(), mode="fused")
    x = _drawn(1, 64, 256, dtype=torch.bfloat16)
    w = _drawn(2, 128, 256, dtype=torch.bfloat16)
    gather, scatter = ops.all_gather_gemm, ops.gemm_reduce_scatter
    found = {
        "x is torch.float32": _refused(lambda: gather(x.float(), w.float())),
        "weight is torch.float16 and x is torch.bfloat16": _refused(lambda: gather(x, w.half())),
        "weight is on cpu": _refused(lambda: scatter(x, w.cpu())),
        "weight is [128, 248] and x has 256 columns": _refused(
            lambda: scatter(x, w[:, :248].contiguous())
        ),
        "has strides": _refused(lambda: gather(x[:, :128].contiguous(), w[:, ::2])),
        "bias is [64]; it must be [128]": _refused(lambda: gather(x, w, w[0, :64])),
        "num_rows": _refused(lambda: gather(x, w, num_rows=65 * world_size)),
        "weight_layout is 'NN'": _refused(lambda: scatter(x, w, weight_layout="NN")),
        "requires a gradient": _refused(lambda: gather(x, w.clone().requires_grad_())),
    }
    x_TK = torch.cat([x] * world_size)
    problem = mismatch([gather(x, w)], [x_TK.float() @ w.float().t()])
    assert not problem, problem
    settle()
    return found


def _absent(rank: int, world_size: int) -> str:
    """The last rank never calls: the others are told who, within the deadline."""
    # no kernels, which one rank may still compile while another waits
    gather = AllGatherGemm(_world(), mode="reference", deadline_s=2.0)
    x = _drawn(1, 64, 256, dtype=torch.bfloat16)
    w = _drawn(2, 128, 256, dtype=torch.bfloat16)
    gather(x, w)
    return "" if rank == world_size - 1 else _refused(lambda: gather(x, w))


def _refusals(rank: int, world_size: int) -> tuple[dict[str, str], str]:
    return _wrong_calls(rank, world_size), _absent(rank, world_size)


@pytest.mark.multi_gpu
def test_wrong_calls_are_refused_on_every_rank_and_absent_ranks_named() -> None:
    world_size = torch.cuda.device_count()
    for rank, (wrong, absent) in enumerate(
        run_ranks(_refusals, world_size, cuda=True, timeout_s=100)
    ):
        for wanted, error in wrong.items():
            assert wanted in error, (rank, wanted)
        if rank != world_size - 1:
            assert f"[{world_size - 1}]" in absent, absent


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_is_a_plain_gemm(mode: str) -> None:
    x = _drawn(1, 100, 264, dtype=torch.bfloat16)
    w, b = _drawn(2, 72, 264, dtype=torch.bfloat16), _drawn(3, 72, dtype=torch.bfloat16)
    wanted = F.linear(x, w, b)
    settings: dict[str, Any] = {"mode": mode}
    y, gathered = AllGatherGemm(None, **settings)(x, w, b, return_gathered=True)
    assert torch.equal(y, wanted)
    assert torch.equal(gathered, x)
    wanted = F.linear(x, w) + b  # a row-parallel bias comes after the sum over ranks
    turned = w.t().contiguous()
    for operator in (GemmReduceScatter(None, **settings), GemmAllReduce(None, **settings)):
        assert torch.equal(operator(x, w, b), wanted)
        assert mismatch([operator(x, turned, b, weight_layout="KN")], [wanted]) == ""
