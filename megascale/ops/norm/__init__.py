"""LayerNorm and RMSNorm behind a residual sum, in one pass over memory each way.

`residual_norm(x, branch, ...)` gives (x + branch, norm(x + branch)): the stream goes on as the sum,
the next sublayer reads the norm. Backward takes the gradients of both and gives one, that of the
sum, so that neither the sum forward nor the meeting of two gradients backward is a pass of its own.
Weight and bias gradients are summed in fp32 on the way (`ops/column_sum`). Kept for backward: the
sum, which is the stream itself, and two numbers a row.

Triton on CUDA (`kernel.py`) for rows of up to MOST_COLUMNS; torch's operations on CPU and for wider
rows. In "plain" mode an addition, torch's norm, and their own backward passes.

T tokens, D columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale.ops.checks import check_beside, check_matrix
from megascale.ops.column_sum import accumulate_partials
from megascale.ops.mode import OperatorMode, takes_kernels

MOST_COLUMNS = 16384  # more do not fit the registers of a program


def residual_norm(
    x_TD: Tensor,
    branch_TD: Tensor | None,
    weight_D: Tensor,
    bias_D: Tensor | None,
    eps: float,
    mode: OperatorMode = "fused",
) -> tuple[Tensor, Tensor]:
    """(x + branch, its norm), or (x, its norm). LayerNorm with a bias, RMSNorm without.

    x, branch  [T, D]; weight, bias [D]; of one dtype on one device, strided as they like
    Gradients of weight and bias go to `main_grad` where there is one (`ops/linear.py`).
    Raises ValueError for tensors that do not fit each other.
    """
    check_matrix("residual_norm", "x", x_TD)
    check_beside("residual_norm", "branch", branch_TD, x_TD.shape, x_TD)
    check_beside("residual_norm", "weight", weight_D, x_TD.shape[1:], x_TD)
    check_beside("residual_norm", "bias", bias_D, x_TD.shape[1:], x_TD)
    if mode == "plain":
        sum_TD = x_TD if branch_TD is None else x_TD + branch_TD
        if bias_D is None:
            return sum_TD, F.rms_norm(sum_TD, weight_D.shape, weight_D, eps)
        return sum_TD, F.layer_norm(sum_TD, weight_D.shape, weight_D, bias_D, eps)
    sum_TD, y_TD = _ResidualNorm.apply(x_TD, branch_TD, weight_D, bias_D, eps)
    return sum_TD, y_TD


def _takes_kernels(*tensors: Tensor | None) -> bool:
    first = tensors[0]
    assert first is not None
    return first.shape[-1] <= MOST_COLUMNS and takes_kernels("fused", *tensors)


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        branch_TD: Tensor | None,
        weight_D: Tensor,
        bias_D: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.weight, ctx.bias = weight_D, bias_D  # not saved tensors: for their `main_grad`
        ctx.has_branch = branch_TD is not None
        ctx.set_materialize_grads(False)
        if _takes_kernels(x_TD, branch_TD, weight_D, bias_D):
            from megascale.ops.norm.launch import launch_forward

            sum_TD, y_TD, mean_T, rstd_T = launch_forward(x_TD, branch_TD, weight_D, bias_D, eps)
        else:
            sum_TD = x_TD if branch_TD is None else x_TD + branch_TD
            y_TD, mean_T, rstd_T = _normalise(sum_TD, weight_D, bias_D, eps)
        ctx.save_for_backward(sum_TD, mean_T, rstd_T)
        return sum_TD.view_as(sum_TD) if branch_TD is None else sum_TD, y_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_sum_TD: Tensor | None, grad_y_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        sum_TD, mean_T, rstd_T = ctx.saved_tensors
        grad_TD, grad_weight, grad_bias = grad_sum_TD, None, None
        if grad_y_TD is not None:
            gradients = _gradients
            if _takes_kernels(sum_TD, ctx.weight, ctx.bias, grad_y_TD, grad_sum_TD):
                from megascale.ops.norm.launch import launch_backward as gradients
            grad_TD, weight_partials_PD, bias_partials_PD = gradients(
                sum_TD, ctx.weight, grad_y_TD, grad_sum_TD, mean_T, rstd_T
            )
            if ctx.needs_input_grad[2]:
                grad_weight = accumulate_partials(ctx.weight, weight_partials_PD)
            if ctx.bias is not None and ctx.needs_input_grad[3]:
                assert bias_partials_PD is not None, "LayerNorm sums its bias gradient"
                grad_bias = accumulate_partials(ctx.bias, bias_partials_PD)
        return grad_TD, grad_TD if ctx.has_branch else None, grad_weight, grad_bias, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _normalise(
    x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(norm, mean, 1 / deviation) of each row; RMSNorm has no mean."""
    wide_TD, mean_T = x_TD.to(_wide(x_TD.dtype)), None
    if bias_D is not None:
        mean_T = wide_TD.mean(-1)
        wide_TD = wide_TD - mean_T[:, None]
    rstd_T = torch.rsqrt(wide_TD.square().mean(-1) + eps)
    y_TD = wide_TD * rstd_T[:, None] * weight_D
    return (y_TD if bias_D is None else y_TD + bias_D).to(x_TD.dtype), mean_T, rstd_T


def _gradients(
    sum_TD: Tensor,
    weight_D: Tensor,
    grad_y_TD: Tensor,
    grad_sum_TD: Tensor | None,
    mean_T: Tensor | None,
    rstd_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of the sum, and `[1, D]` of weight and bias: `kernel.py` says the formula."""
    wide = _wide(sum_TD.dtype)
    h_TD, grad_y_TD = sum_TD.to(wide), grad_y_TD.to(wide)
    bias_partials_1D = None
    if mean_T is not None:
        h_TD = h_TD - mean_T[:, None]
        bias_partials_1D = grad_y_TD.sum(0, keepdim=True)
    rstd_T1 = rstd_T[:, None]
    h_TD = h_TD * rstd_T1
    grad_TD = grad_y_TD * weight_D
    through_TD = grad_TD - h_TD * (grad_TD * h_TD).mean(-1, keepdim=True)
    if mean_T is not None:
        through_TD -= grad_TD.mean(-1, keepdim=True)
    through_TD *= rstd_T1
    if grad_sum_TD is not None:
        through_TD += grad_sum_TD
    weight_partials_1D = (grad_y_TD * h_TD).sum(0, keepdim=True)
    return through_TD.to(sum_TD.dtype), weight_partials_1D, bias_partials_1D


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * weight + bias`."""
    wide = x.to(_wide(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return (y if bias is None else y + bias).to(x.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`."""
    wide = x.to(_wide(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
