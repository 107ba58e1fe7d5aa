"""Cut a matrix by columns so that the gradient comes back as one matrix, without a copy.

torch's `split` joins the gradients of its parts by `cat`: every element is read and written once
more (0.5 % of a training step with a layer as wide as GPT-3's). Here the parts share one gradient
matrix, and an operator that consumes a part writes the part's gradient into it:

    (a, b), (part_a, part_b) = split_columns(x, (n, m))
    y = operator(a, part=part_a)        # its backward fills part_a.gradient()

Invariant: an operator that is handed a `Part` is the only consumer of that tensor and writes all of
`part.gradient()`. A gradient that arrives in other memory (a consumer that knows no parts) is
copied into place, so the result is right in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Whole:
    """The gradient matrix of one call, made when the first part asks for it."""

    def __init__(self, x_TN: Tensor) -> None:
        self._like = x_TN.shape, x_TN.dtype, x_TN.device
        self._gradient: Tensor | None = None

    def gradient(self) -> Tensor:
        if self._gradient is None:
            shape, dtype, device = self._like
            self._gradient = torch.empty(shape, dtype=dtype, device=device)
        return self._gradient

    def take(self) -> Tensor:
        """The matrix, for the last time: a second backward pass gets one of its own."""
        gradient, self._gradient = self.gradient(), None
        return gradient


class Part:
    """A range of columns of the gradient matrix."""

    def __init__(self, whole: _Whole, start: int, stop: int) -> None:
        self._whole, self._columns = whole, slice(start, stop)

    def gradient(self) -> Tensor:
        """Where backward writes the gradient of this part; undefined values, [T, n]."""
        return self._whole.gradient()[:, self._columns]


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TN: Tensor, widths: tuple[int, ...], whole: _Whole) -> Any:
        ctx.widths, ctx.whole = widths, whole
        ctx.set_materialize_grads(False)
        return torch.split(x_TN, list(widths), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None]:
        whole: Tensor = ctx.whole.take()
        for place, grad in zip(torch.split(whole, list(ctx.widths), dim=1), grads, strict=True):
            if grad is None:
                place.zero_()
            elif (grad.data_ptr(), grad.stride()) != (place.data_ptr(), place.stride()):
                place.copy_(grad)
        return whole, None, None


def split_columns(
    x_TN: Tensor, widths: Sequence[int]
) -> tuple[tuple[Tensor, ...], tuple[Part, ...]]:
    """Views of `x_TN` of these widths, which add up to its columns, and their places in its
    gradient; reference: `torch.split`."""
    whole = _Whole(x_TN)
    parts, start = [], 0
    for width in widths:
        parts.append(Part(whole, start, start + width))
        start += width
    assert start == x_TN.shape[1], (widths, x_TN.shape)
    views: tuple[Tensor, ...] = _Split.apply(x_TN, tuple(widths), whole)
    return views, tuple(parts)
