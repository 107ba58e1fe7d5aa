"""Gradients of the spread linears against autograd of one device in fp64, also with uneven rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megascale.flux import (
    TensorOps,
    column_parallel_linear,
    row_parallel_linear,
    row_parallel_pair,
)
from megascale.flux.tiles import shard_rows
from tests.distributed import run_ranks

pytestmark = pytest.mark.full  # processes and the interpreter: half a minute together

IN, IN_B, OUT = 12, 20, 8  # 4 ranks divide all
ROWS = (8, 3, 5, 13)
TOLERANCE = 1e-12  # relative, fp64: the sums differ in order alone
CASES = list(itertools.product(("column", "row", "pair"), ROWS, (False, True)))
Case = tuple[str, int, bool]
Named = dict[str, NDArray[np.float64]]

# The dimension that ranks cut; -1 rows, in shares that may be uneven. Others are whole.
CUTS = {
    "column": {"x": -1, "weight": 0, "bias": 0, "y": 1},
    "row": {"x": 1, "weight": 1, "y": -1},
    "pair": {"x": 1, "weight": 1, "b": 1, "weight_b": 1, "y": -1},
}


def _whole(kind: str, m: int, bias: bool) -> dict[str, Tensor]:
    """Inputs of a case, and "y": the gradient of the output."""
    shapes: dict[str, tuple[int, ...]] = {"x": (m, IN), "weight": (OUT, IN), "y": (m, OUT)}
    if kind == "pair":
        shapes |= {"b": (m, IN_B), "weight_b": (OUT, IN_B)}
    if bias:
        shapes["bias"] = (OUT,)
    generator = torch.Generator().manual_seed(m)
    return {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in shapes.items()
    }


def _part(kind: str, name: str, whole: Tensor, rank: int, world_size: int) -> Tensor:
    cut = CUTS[kind].get(name)
    if cut is None:
        return whole.clone()
    if cut == -1:
        return whole[slice(*shard_rows(whole.shape[0], world_size, rank))].clone()
    return whole.chunk(world_size, cut)[rank].contiguous()


def _wanted(kind: str, m: int, bias: bool) -> dict[str, Tensor]:
    values = _whole(kind, m, bias)
    grad_y = values.pop("y")
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    y = F.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
    if kind == "pair":
        y = y + F.linear(leaves["b"], leaves["weight_b"])
    y.backward(grad_y)
    grads = {f"grad_{name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"y": y.detach(), **grads}


def _apply(kind: str, m: int, leaves: dict[str, Tensor], ops: TensorOps) -> Tensor:
    x, weight, bias = leaves["x"], leaves["weight"], leaves.get("bias")
    if kind == "column":
        return column_parallel_linear(x, weight, bias, ops, num_rows=m)
    if kind == "row":
        return row_parallel_linear(x, weight, bias, ops)
    return row_parallel_pair(x, weight, leaves["b"], leaves["weight_b"], bias, ops)


def _run(rank: int, world_size: int) -> dict[Case, Named]:
    ops = TensorOps.of(dist.group.WORLD if world_size > 1 else None)
    found: dict[Case, Named] = {}
    for kind, m, bias in CASES:
        values = _whole(kind, m, bias)
        parts = {name: _part(kind, name, v, rank, world_size) for name, v in values.items()}
        grad_y = parts.pop("y")
        leaves = {name: part.requires_grad_() for name, part in parts.items()}
        y = _apply(kind, m, leaves, ops)
        out = (y * 1.0).add_(0.0) if bias else y.add_(0.0)  # a result may be changed in place
        out.backward(grad_y)
        grads = {f"grad_{n}": leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}
        assert len(grads) == len(leaves), (kind, list(grads))
        named = {"y": y.detach(), **grads}
        found[kind, m, bias] = {name: value.numpy() for name, value in named.items()}
    return found


def _joined(kind: str, name: str, parts: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The whole tensor; of what every rank holds whole (a row's bias) the gradients are partial."""
    cut = CUTS[kind].get(name.removeprefix("grad_"))
    if cut is None:
        return np.sum(parts, axis=0)
    return np.concatenate(parts, 0 if cut == -1 else cut)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_equal_those_of_one_device(world_size: int) -> None:
    by_rank = run_ranks(_run, world_size)
    for kind, m, bias in CASES:
        for name, wanted in _wanted(kind, m, bias).items():
            parts = [found[kind, m, bias][name] for found in by_rank]
            off = np.abs(_joined(kind, name, parts) - wanted.numpy()).max()
            assert off <= TOLERANCE * wanted.abs().max(), (kind, m, bias, name, off)


# ---------------------------------------------------------------- what runs under what


class Recorder:
    """Notes the order of calls of a `TensorOps`, and the spans around them."""

    def __init__(self, ops: TensorOps) -> None:
        self.events: list[str] = []
        self._gather = ops.all_gather_gemm.start_all_gather
        self._start = ops.gemm_reduce_scatter.start
        vars(ops.all_gather_gemm)["start_all_gather"] = self._start_all_gather
        vars(ops.gemm_reduce_scatter)["start"] = self._start_gemm

    def _noted(self, name: str, wait: Any) -> Any:
        self.events.append(f"start {name}")

        def ended() -> Tensor:
            self.events.append(f"wait {name}")
            value: Tensor = wait()
            return value

        return ended

    def _start_all_gather(self, *args: Any) -> Any:
        return self._noted("gather", self._gather(*args))

    def _start_gemm(self, *args: Any, **kwargs: Any) -> Any:
        return self._noted("input gradient", self._start(*args, **kwargs))


def _order(rank: int, world_size: int) -> list[list[str]]:
    found = []
    for frozen in ("", "weight", "x"):
        ops = TensorOps.of(dist.group.WORLD)
        recorder = Recorder(ops)
        x = torch.randn(3, IN, requires_grad=frozen != "x")
        weight = torch.randn(OUT, IN, requires_grad=frozen != "weight")
        column_parallel_linear(x, weight, None, ops).sum().backward()
        assert (x.grad is None) == (frozen == "x")
        assert (weight.grad is None) == (frozen == "weight")
        found.append(recorder.events)
    return found


def test_the_gather_for_the_weight_gradient_begins_before_the_input_gradient() -> None:
    both = ["start gather", "start input gradient", "wait gather", "wait input gradient"]
    for found in run_ranks(_order, 2):
        assert found == [both, both[1::2], both[::2]]


def _row_frozen(rank: int, world_size: int) -> list[bool]:
    ops = TensorOps.of(dist.group.WORLD)
    x, weight = torch.randn(4, IN), torch.randn(OUT, IN)
    bias = torch.randn(OUT, requires_grad=True)
    row_parallel_linear(x, weight, bias, ops).sum().backward()
    assert bias.grad is not None
    return [torch.allclose(bias.grad, torch.full((OUT,), 2.0)), weight.grad is None]


def test_a_row_layer_that_needs_its_bias_alone_gathers_nothing() -> None:
    assert run_ranks(_row_frozen, 2) == [[True, True]] * 2


def _accumulates(rank: int, world_size: int) -> list[bool]:
    """bf16 parameters, gradients added to fp32 `main_grad`: of both calls, none to autograd."""
    ops = TensorOps.of(dist.group.WORLD)
    x = torch.randn(4, IN).bfloat16().requires_grad_()
    weight = torch.randn(OUT, IN).bfloat16().requires_grad_()
    weight.main_grad = torch.zeros(OUT, IN)  # type: ignore[attr-defined]
    for _ in range(2):
        column_parallel_linear(x, weight, None, ops).sum().backward()
    gathered = ops.all_gather_gemm.start_all_gather(x.detach())()
    wanted = 2 * gathered.float().sum(0).expand(OUT, IN)
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return [weight.grad is None, torch.allclose(main_grad, wanted, rtol=1e-6)]


def test_weight_gradients_accumulate_in_fp32() -> None:
    assert run_ranks(_accumulates, 2) == [[True, True]] * 2
