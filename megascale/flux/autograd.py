"""Linear layers spread over ranks, with gradients, over the operators (MegaScale 3.2; Flux 2.1).

| | forward | input gradient | needed for the weight gradient |
|---|---|---|---|
| column parallel | all-gather + GEMM | GEMM + reduce-scatter | the gathered input |
| row parallel | GEMM + reduce-scatter | all-gather + GEMM | the gathered gradient |

Between such layers a rank holds its own token rows (sequence parallelism). Only the own rows of a
column layer's input are kept for backward, which gathers them again: that all-gather begins before
the input gradient and is waited for after it, so the GEMM hides it. A row layer's gathered gradient
is what its input-gradient operator has gathered anyway.

Where kernels run, a gathered tensor is a view of the arena's slot and is read before the next call
but one of the group begins: here within the same backward. A deferred weight gradient
(`ops/deferred.py`) keeps the own rows and gathers them again: for a column layer the same one
gather, under another weight's GEMM in place of the input gradient's; for a row layer one more.

Weight gradients accumulate (`ops/linear.py`): into `weight.main_grad` where it exists, else they
are returned to autograd. A row layer's bias is whole on every rank and its gradient is that of the
own rows: sum it over the group, as that of every parameter that sees own token rows only.

T tokens of all ranks, t of this rank; I inputs, O outputs; a lower-case letter is a dimension that
is cut here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.operators import AllGatherGemm, GemmAllReduce, GemmReduceScatter
from megascale.ops.deferred import Late, defer_product, gathers_later, kept
from megascale.ops.linear import accumulate_bias_gradient, accumulate_weight_gradient
from megascale.ops.mode import OperatorMode


def _no_span(_name: str, /, **_fields: Any) -> AbstractContextManager[Any]:
    return nullcontext()


@dataclass(frozen=True)
class TensorOps:
    """The operators of one group, with equal settings, and where spans of their calls go.

    span       `span(name, group="tensor")` gives a context manager around a call
    detail     the same for the parts of a backward: for who wants to see their order
    operators  the form of what runs beside the GEMMs: the sum of a bias gradient (`ops/mode.py`)
    """

    all_gather_gemm: AllGatherGemm
    gemm_reduce_scatter: GemmReduceScatter
    gemm_all_reduce: GemmAllReduce
    span: Callable[..., AbstractContextManager[Any]] = _no_span
    operators: OperatorMode = "fused"
    detail: Callable[..., AbstractContextManager[Any]] = _no_span

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None,
        *,
        span: Callable[..., AbstractContextManager[Any]] = _no_span,
        **settings: Any,
    ) -> TensorOps:
        """The three operators of `group`; `settings` are theirs (mode, tune, ...)."""
        return cls(
            AllGatherGemm(group, **settings),
            GemmReduceScatter(group, **settings),
            GemmAllReduce(group, **settings),
            span,
        )


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_tI: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ops: TensorOps,
        num_rows: int | None,
    ) -> Tensor:
        ctx.save_for_backward(x_tI)
        # Not saved tensors: recomputation hands back copies of those, without `main_grad`.
        ctx.weight, ctx.bias, ctx.ops, ctx.num_rows = weight, bias, ops, num_rows
        with ops.span("tp_all_gather_gemm", group="tensor"):
            y_To: Tensor = ops.all_gather_gemm(x_tI, weight, bias, num_rows=num_rows)
        return _own(y_To)

    @staticmethod
    def backward(ctx: Any, grad_To: Tensor) -> tuple[Tensor | None, ...]:
        (x_tI,) = ctx.saved_tensors
        ops: TensorOps = ctx.ops
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_weight and gathers_later():
            late = _gathered_later(ops, x_tI, ctx.num_rows)
            needs_weight = not defer_product(ctx.weight, grad_To, late)
        with ops.span("tp_column_backward", group="tensor"):
            if needs_weight:  # under the input gradient's GEMM
                with ops.detail("tp_post", op="all_gather"):
                    gathered = ops.all_gather_gemm.start_all_gather(x_tI, ctx.num_rows)
            if needs_x:  # the reference's transfer: under the weight gradient's
                with ops.detail("tp_gemm", op="input_gradient"):
                    reduced = ops.gemm_reduce_scatter.start(grad_To, ctx.weight, weight_layout="KN")
            if needs_weight:
                grad_weight = accumulate_weight_gradient(ctx.weight, grad_To, kept(gathered()))
            if needs_bias:
                grad_bias = accumulate_bias_gradient(ctx.bias, grad_To, ops.operators)
            if needs_x:
                grad_x = reduced()
            return grad_x, grad_weight, grad_bias, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_Ti: Tensor, weight: Tensor, bias: Tensor | None, ops: TensorOps
    ) -> Tensor:
        ctx.save_for_backward(x_Ti)
        ctx.weight, ctx.bias, ctx.ops = weight, bias, ops
        with ops.span("tp_gemm_reduce_scatter", group="tensor"):
            return _own(ops.gemm_reduce_scatter(x_Ti, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad_tO: Tensor) -> tuple[Tensor | None, ...]:
        (x_Ti,) = ctx.saved_tensors
        grads = _row_backward(ctx, grad_tO, [(x_Ti, ctx.weight)])
        return *grads, None


class _RowPair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a_Ti: Tensor,
        weight_a: Tensor,
        b_Tj: Tensor,
        weight_b: Tensor,
        bias: Tensor | None,
        ops: TensorOps,
    ) -> Tensor:
        ctx.save_for_backward(a_Ti, b_Tj)
        ctx.weight_a, ctx.weight_b, ctx.bias, ctx.ops = weight_a, weight_b, bias, ops
        with ops.span("tp_gemm_reduce_scatter", group="tensor"):
            return _own(ops.gemm_reduce_scatter.pair(a_Ti, weight_a, b_Tj, weight_b, bias))

    @staticmethod
    def backward(ctx: Any, grad_tO: Tensor) -> tuple[Tensor | None, ...]:
        a_Ti, b_Tj = ctx.saved_tensors
        grads = _row_backward(ctx, grad_tO, [(a_Ti, ctx.weight_a), (b_Tj, ctx.weight_b)])
        return *grads, None


def _own(y: Tensor) -> Tensor:
    """`y` as no view of anything: autograd forbids to change views in place that a function made,
    and a form may return the first rows of a padded buffer."""
    return y.detach()


def _row_backward(
    ctx: Any, grad_tO: Tensor, terms: list[tuple[Tensor, Tensor]]
) -> list[Tensor | None]:
    """Gradients of (x, weight) of each term, then of the bias: one gather of `grad_tO` for all."""
    ops: TensorOps = ctx.ops
    num_rows = terms[0][0].shape[0]
    grads: list[Tensor | None] = [None] * (2 * len(terms) + 1)
    needs = ctx.needs_input_grad
    with ops.span("tp_row_backward", group="tensor"):
        if any(needs[: 2 * len(terms)]):
            weights = [weight for _, weight in terms]
            grads_x, grad_TO = ops.all_gather_gemm(
                grad_tO, weights, weight_layout="KN", num_rows=num_rows, return_gathered=True
            )
            later = gathers_later()
            operand = _gathered_later(ops, grad_tO, num_rows) if later else kept(grad_TO)
            for i, (x_Ti, weight) in enumerate(terms):
                grads[2 * i] = grads_x[i] if needs[2 * i] else None
                if needs[2 * i + 1] and not defer_product(weight, operand, x_Ti):
                    grads[2 * i + 1] = accumulate_weight_gradient(weight, grad_TO, x_Ti)
        if needs[2 * len(terms)]:
            grads[-1] = accumulate_bias_gradient(ctx.bias, grad_tO, ops.operators)
    return grads


def _gathered_later(ops: TensorOps, x_tD: Tensor, num_rows: int | None) -> Late:
    """Rows that a deferred weight gradient gathers: a view of the arena would not last."""

    def start() -> Callable[[], Tensor]:
        with ops.span("tp_weight_gather", group="tensor"):
            return ops.all_gather_gemm.start_all_gather(x_tD, num_rows)

    return Late(start)


def _check_ops(ops: Any) -> None:
    """Other arguments are checked by the operators, before they start anything."""
    if not isinstance(ops, TensorOps):
        raise FluxError(
            f"ops is of type {type(ops).__name__}; it must be a TensorOps: TensorOps.of(group)"
        )


def column_parallel_linear(
    x_tI: Tensor,
    weight_oI: Tensor,
    bias_o: Tensor | None,
    ops: TensorOps,
    *,
    num_rows: int | None = None,
) -> Tensor:
    """y_To = all_gather(x_tI) @ weight^T + bias, with gradients.

    x_tI       the own token rows, [t, I]
    weight_oI  the own rows of the weight, [O / ranks, I]; bias_o likewise
    num_rows   T, where ranks hold unequal shares of the rows
    """
    _check_ops(ops)
    y_To: Tensor = _Column.apply(x_tI, weight_oI, bias_o, ops, num_rows)
    return y_To


def row_parallel_linear(
    x_Ti: Tensor, weight_Oi: Tensor, bias_O: Tensor | None, ops: TensorOps
) -> Tensor:
    """y_tO = reduce_scatter(x_Ti @ weight^T) + bias, with gradients.

    x_Ti       all token rows, the own columns, [T, I / ranks]
    weight_Oi  the own columns of the weight, [O, I / ranks]; bias_O whole, added once
    """
    _check_ops(ops)
    y_tO: Tensor = _Row.apply(x_Ti, weight_Oi, bias_O, ops)
    return y_tO


def row_parallel_pair(
    a_Ti: Tensor,
    weight_Oi: Tensor,
    b_Tj: Tensor,
    weight_Oj: Tensor,
    bias_O: Tensor | None,
    ops: TensorOps,
) -> Tensor:
    """y_tO = reduce_scatter(a @ weight_a^T + b @ weight_b^T) + bias: a parallel block's way out.

    One transfer for both products (`gemm_reduce_scatter/pair.py`); in backward one gather of the
    gradient for both weights.
    """
    _check_ops(ops)
    y_tO: Tensor = _RowPair.apply(a_Ti, weight_Oi, b_Tj, weight_Oj, bias_O, ops)
    return y_tO
