"""The activation between the two linears of the MLP, with the first one's bias, in one pass.

`activation(name, x_TF, bias_F)` takes the output of the first linear without its bias: for "swiglu"
[gate | up] side by side, and the result is half as wide. Forward reads x and writes the result;
backward reads x and the result's gradient and writes the gradient of x, from which the bias
gradient is summed on the way (`column_sum`), where a linear with the bias inside would read it once
more. All arithmetic is fp32 in registers (fp64 for fp64); what is kept for backward is x.

Triton on CUDA (`kernel.py`), torch's operations on CPU; in "plain" mode torch's operations and
their own backward passes, a kernel each.

T tokens, F columns of x, A columns of the result (F, or F / 2 for "swiglu").
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megascale.ops.checks import check_beside, check_matrix
from megascale.ops.column_split import Part
from megascale.ops.column_sum import accumulate_partials, partial_column_sums
from megascale.ops.mode import OperatorMode, takes_kernels

_GELU_FORMS = {"gelu": "none", "gelu_tanh": "tanh"}


def activation(
    name: str,
    x_TF: Tensor,
    bias_F: Tensor | None = None,
    mode: OperatorMode = "fused",
    part: Part | None = None,
) -> Tensor:
    """The activation of that name (`model.activation`) of `x + bias`, `[T, A]`.

    bias_F  its gradient goes to `main_grad` where there is one (`ops/linear.py`)
            [F] of x's dtype, strided as it likes
    part    where backward writes the gradient of x, if x is a part of a wider tensor
    Raises ValueError for tensors that do not fit each other.
    """
    check_matrix("activation", "x", x_TF)
    check_beside("activation", "bias", bias_F, x_TF.shape[1:], x_TF)
    if name == "swiglu" and x_TF.shape[1] % 2:
        raise ValueError(
            f"activation: x has {x_TF.shape[1]} columns; legal for swiglu: an even number, gates "
            "and as many values behind them"
        )
    if mode == "plain":
        return _forward(name, x_TF if bias_F is None else x_TF + bias_F)
    y_TA: Tensor = _Activation.apply(x_TF, bias_F, name, part)
    return y_TA


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TF: Tensor, bias_F: Tensor | None, name: str, part: Part | None
    ) -> Tensor:
        ctx.save_for_backward(x_TF)
        ctx.bias, ctx.name, ctx.part = bias_F, name, part  # the bias: for its `main_grad`
        if takes_kernels("fused", x_TF, bias_F):
            from megascale.ops.activation.launch import launch_forward

            return launch_forward(name, x_TF, bias_F)
        return _forward(name, x_TF if bias_F is None else x_TF + bias_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TA: Tensor) -> tuple[Tensor | None, ...]:
        (x_TF,) = ctx.saved_tensors
        bias_F: Tensor | None = ctx.bias
        needs_bias = bias_F is not None and ctx.needs_input_grad[1]
        # row by row, however x lies
        grad_x_TF = x_TF.new_empty(x_TF.shape) if ctx.part is None else ctx.part.gradient()
        if takes_kernels("fused", x_TF, bias_F):
            from megascale.ops.activation.launch import launch_backward

            partials_PF = launch_backward(
                ctx.name, x_TF, bias_F, grad_TA, grad_x_TF, sum_rows=needs_bias
            )
        else:
            grad_x_TF.copy_(_backward(ctx.name, x_TF if bias_F is None else x_TF + bias_F, grad_TA))
            partials_PF = partial_column_sums(grad_x_TF) if needs_bias else None
        grad_bias = None
        if bias_F is not None and partials_PF is not None:
            grad_bias = accumulate_partials(bias_F, partials_PF)
        return grad_x_TF, grad_bias, None, None


def _forward(name: str, x_TF: Tensor) -> Tensor:
    if name == "swiglu":
        gate, up = x_TF.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(x_TF, approximate=_GELU_FORMS[name])


def _backward(name: str, x_TF: Tensor, grad_TA: Tensor) -> Tensor:
    if name != "swiglu":
        return torch.ops.aten.gelu_backward(grad_TA, x_TF, approximate=_GELU_FORMS[name])
    gate, up = x_TF.chunk(2, dim=-1)
    grad_gate = torch.ops.aten.silu_backward(grad_TA * up, gate)
    return torch.cat((grad_gate, grad_TA * F.silu(gate)), dim=-1)


def activation_reference(name: str, x_TF: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """The textbook formulas."""
    if bias_F is not None:
        x_TF = x_TF + bias_F
    if name == "gelu":
        return x_TF * 0.5 * (1.0 + torch.erf(x_TF / math.sqrt(2.0)))
    if name == "gelu_tanh":
        inner = math.sqrt(2.0 / math.pi) * (x_TF + 0.044715 * x_TF**3)
        return x_TF * 0.5 * (1.0 + torch.tanh(inner))
    gate, up = x_TF.chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up
