"""Sums over the rows of a matrix, for gradients of biases and norms: deterministic, in fp32.

Two steps, on CUDA a kernel each: every program sums the rows of its share of a column block in fp32
(`partial_column_sums`, or the backward kernel of an operator, which reads the matrix anyway); then
the partial sums are added in a fixed order and joined with the parameter's main gradient
(`accumulate_partials`). No atomic additions, and how the rows are shared depends on shapes alone:
equal bits in every run and on every device.

T rows, N columns, P partial sums of each column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.ops.checks import check_matrix
from megascale.ops.deferred import defer_addition
from megascale.ops.main_gradient import add_ordinary_gradient, take_stale
from megascale.ops.mode import OperatorMode, takes_kernels


def partial_column_sums(x_TN: Tensor, mode: OperatorMode = "fused") -> Tensor:
    """fp32 (fp64 for fp64) `[P, N]`, whose sum over P is the sum of the rows of `x_TN`.

    Raises ValueError where that is no matrix of floating-point numbers.
    """
    check_matrix("partial_column_sums", "x", x_TN)
    if takes_kernels(mode, x_TN):
        from megascale.ops.column_sum.launch import launch_column_sums

        return launch_column_sums(x_TN)
    return x_TN.sum(0, keepdim=True, dtype=torch.promote_types(x_TN.dtype, torch.float32))


def accumulate_partials(
    parameter: Tensor, partials_PN: Tensor, mode: OperatorMode = "fused"
) -> Tensor | None:
    """Add the sum over P to `parameter.main_grad` and return None, or return it if there is none.

    parameter  [N], strided as it likes, and so its `main_grad`
    Deferred where weight gradients are (`ops/deferred.py`): the partial sums are kept.
    """

    def add_later() -> None:
        add_ordinary_gradient(parameter, _accumulate(parameter, partials_PN, mode))

    if parameter.is_leaf and defer_addition(add_later):  # autograd waits for what is no leaf
        return None
    return _accumulate(parameter, partials_PN, mode)


def _accumulate(parameter: Tensor, partials_PN: Tensor, mode: OperatorMode) -> Tensor | None:
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    if main_grad is not None:
        _write_sums(main_grad, partials_PN, take_stale(parameter), mode)
        return None
    gradient = torch.empty_like(parameter)
    _write_sums(gradient, partials_PN, True, mode)
    return gradient


def _write_sums(out_N: Tensor, partials_PN: Tensor, overwrite: bool, mode: OperatorMode) -> None:
    if out_N.is_contiguous() and takes_kernels(mode, partials_PN, out_N):
        from megascale.ops.column_sum.launch import launch_add_partials

        launch_add_partials(out_N, partials_PN, overwrite)
        return
    sums_N = partials_PN.sum(0)
    if overwrite:
        out_N.copy_(sums_N)
    else:
        out_N.add_(sums_N)
