"""The activation between the two linears of the MLP, as one pass over memory.

`activation(name, x_TF)` takes the whole output of the first linear. For "swiglu" that is
[gate | up] side by side, and the result is half as wide. On CUDA the chain is compiled: fp32 inside
registers, one kernel forward, one backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.compiled import compiled_on_cuda
from megascale.ops.mode import OperatorMode


@compiled_on_cuda
def gelu(x_TF: Tensor) -> Tensor:
    return F.gelu(x_TF)


@compiled_on_cuda
def gelu_tanh(x_TF: Tensor) -> Tensor:
    return F.gelu(x_TF, approximate="tanh")


@compiled_on_cuda
def swiglu(x_TF: Tensor) -> Tensor:
    gate, up = x_TF.chunk(2, dim=-1)
    return F.silu(gate) * up


_ACTIVATIONS: dict[str, Callable[[OperatorMode, Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "swiglu": swiglu,
}


def activation(name: str, x_TF: Tensor, mode: OperatorMode = "fused") -> Tensor:
    """Apply the activation of that name (`model.activation`)."""
    return _ACTIVATIONS[name](mode, x_TF)


def activation_reference(name: str, x_TF: Tensor) -> Tensor:
    """The textbook formulas."""
    if name == "gelu":
        return x_TF * 0.5 * (1.0 + torch.erf(x_TF / math.sqrt(2.0)))
    if name == "gelu_tanh":
        inner = math.sqrt(2.0 / math.pi) * (x_TF + 0.044715 * x_TF**3)
        return x_TF * 0.5 * (1.0 + torch.tanh(inner))
    gate, up = x_TF.chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up
