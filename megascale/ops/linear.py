"""Linear layers whose weight gradient is accumulated straight into `weight.main_grad`.

`main_grad` is a tensor of the weight's shape in the main dtype (fp32), set by its owner (the
sharded data parallel). Where it exists, the weight-gradient GEMM adds to it and autograd sees no
gradient; where it does not, an ordinary gradient is returned. A GEMM that accumulates
(`weight_gradient`) is faster than a GEMM and an addition, and does not round each micro-batch's
gradient to bf16.

Weights live on `ctx`, not in `save_for_backward`: activation checkpointing hands back detached
copies of saved tensors, and `main_grad` would be lost. Inputs are saved the normal way, so that
hooks on saved tensors (recomputation) see them.

T tokens, I inputs, O outputs. All functions take two-dimensional `x_TI` and weights `[O, I]`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.column_sum import accumulate_partials, partial_column_sums
from megascale.ops.deferred import defer_product
from megascale.ops.main_gradient import take_stale
from megascale.ops.mode import OperatorMode
from megascale.ops.weight_gradient import add_weight_gradient


def accumulate_weight_gradient(weight: Tensor, grad_y_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """Add `grad_y^T @ x` to `weight.main_grad` and return None, or return it if there is none.

    Inside `deferring` nothing is computed: the operands are kept (`ops/deferred.py`).
    """
    if defer_product(weight, grad_y_TO, x_TI):
        return None
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None:
        return grad_y_TO.t() @ x_TI
    add_weight_gradient(main_grad, (grad_y_TO, x_TI), overwrite=take_stale(weight))
    return None


def accumulate_bias_gradient(
    bias: Tensor, grad_y_TO: Tensor, mode: OperatorMode = "fused"
) -> Tensor | None:
    """The same for a bias: the sum over rows in fp32 (`ops/column_sum`)."""
    return accumulate_partials(bias, partial_column_sums(grad_y_TO, mode), mode)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.weight, ctx.bias = weight, bias
        return F.linear(x_TI, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_y_TO: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad_y_TO @ ctx.weight if needs_x else None
        grad_weight = (
            accumulate_weight_gradient(ctx.weight, grad_y_TO, x_TI) if needs_weight else None
        )
        grad_bias = accumulate_bias_gradient(ctx.bias, grad_y_TO) if needs_bias else None
        return grad_x, grad_weight, grad_bias


class _LinearPair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a_TI: Tensor,
        weight_a: Tensor,
        b_TJ: Tensor,
        weight_b: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(a_TI, b_TJ)
        ctx.weight_a, ctx.weight_b, ctx.bias = weight_a, weight_b, bias
        return F.linear(a_TI, weight_a, bias).addmm_(b_TJ, weight_b.t())

    @staticmethod
    def backward(ctx: Any, grad_y_TO: Tensor) -> tuple[Tensor | None, ...]:
        a_TI, b_TJ = ctx.saved_tensors
        needs_a, needs_weight_a, needs_b, needs_weight_b, needs_bias = ctx.needs_input_grad
        grad_a = grad_y_TO @ ctx.weight_a if needs_a else None
        grad_b = grad_y_TO @ ctx.weight_b if needs_b else None
        grad_weight_a = (
            accumulate_weight_gradient(ctx.weight_a, grad_y_TO, a_TI) if needs_weight_a else None
        )
        grad_weight_b = (
            accumulate_weight_gradient(ctx.weight_b, grad_y_TO, b_TJ) if needs_weight_b else None
        )
        grad_bias = accumulate_bias_gradient(ctx.bias, grad_y_TO) if needs_bias else None
        return grad_a, grad_weight_a, grad_b, grad_weight_b, grad_bias


def linear(x_TI: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight^T + bias`; reference: `torch.nn.functional.linear`."""
    return _Linear.apply(x_TI, weight, bias)


def linear_pair(
    a_TI: Tensor, weight_a: Tensor, b_TJ: Tensor, weight_b: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`a @ weight_a^T + b @ weight_b^T + bias`: both outputs of the parallel block in one tensor.

    The second product is accumulated onto the first (MegaScale 3.1), so that tensor parallelism
    reduces one tensor a layer.
    """
    return _LinearPair.apply(a_TI, weight_a, b_TJ, weight_b, bias)
