"""How the backward pass tells data parallelism what is ready.

Both hooks respect deferred weight gradients (`ops/deferred.py`): then gradients are added, and a
unit's end is told, when the deferred work runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megascale.ops.deferred import defer_addition, defer_end_of_unit
from megascale.ops.main_gradient import add_to_main_gradient


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ended: Callable[[], None]) -> Tensor:
        ctx.ended = ended
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not defer_end_of_unit(ctx.ended):
            ctx.ended()
        return grad, None


def boundary(x: Tensor, ended: Callable[[], None]) -> Tensor:
    """`x`; its backward calls `ended`, because all that was computed from it has its gradients."""
    y: Tensor = _Boundary.apply(x, ended)
    return y


def watch(parameter: nn.Parameter) -> None:
    """Ordinary autograd gradients (norms, embeddings) join the main gradient and are dropped."""
    parameter.register_post_accumulate_grad_hook(_add_to_main_gradient)


def _add_to_main_gradient(parameter: nn.Parameter) -> None:
    """There is no gradient where an operator has added to the main gradient itself."""
    gradient = parameter.grad
    if gradient is None:
        return
    parameter.grad = None
    if not defer_addition(lambda: add_to_main_gradient(parameter, gradient)):
        add_to_main_gradient(parameter, gradient)
