"""Cross-entropy over a vocabulary that tensor-parallel ranks share (Megatron-LM, section 3).

Three numbers a token cross the group (maximum; then sum of exponentials and target logit as one
message); the logits never do, and their gradient is written over them. Every rank gets the whole
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.ops.cross_entropy import (
    local_valid,
    relative_to,
    row_statistics,
    write_gradient_,
)
from megascale.ops.mode import OperatorMode
from megascale.parallel.tensor import TensorParallel

# Called with (logits_Tv, labels_T, mask_T); returns the sum of the masked losses.
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        labels_T: Tensor,
        mask_T: Tensor,
        vocab_size: int,
        tp: TensorParallel,
        mode: OperatorMode,
    ) -> Tensor:
        cols = logits_Tv.shape[1]
        start = tp.rank * cols
        valid = local_valid(cols, start, vocab_size)
        with tp.span("tp_cross_entropy", group="tensor"):
            statistics_3T = row_statistics(logits_Tv, labels_T, start, valid, mode)
            max_T = statistics_3T[0].clone()
            _all_reduce(max_T, dist.ReduceOp.MAX, tp)
            sums_2T = relative_to(max_T, statistics_3T)
            _all_reduce(sums_2T, dist.ReduceOp.SUM, tp)
        log_sum_T = sums_2T[0].log()
        ctx.save_for_backward(logits_Tv, labels_T, mask_T, max_T + log_sum_T)
        ctx.start, ctx.valid, ctx.mode = start, valid, mode
        return ((log_sum_T + (max_T - sums_2T[1])) * mask_T).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits_Tv, labels_T, mask_T, lse_T = ctx.saved_tensors
        grad_Tv = logits_Tv.detach()
        scale_T = grad_loss.to(lse_T.dtype) * mask_T
        write_gradient_(grad_Tv, labels_T, lse_T, scale_T, ctx.start, ctx.valid, ctx.mode)
        return grad_Tv, None, None, None, None, None


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, tp: TensorParallel) -> None:
    if tp.group is not None:
        with tp.span("tp_all_reduce", op="all_reduce", group="tensor", work="tp"):
            dist.all_reduce(values, op=op, group=tp.group)


def sharded_cross_entropy(
    vocab_size: int, tp: TensorParallel, mode: OperatorMode = "fused"
) -> LossFunction:
    """The loss for logits whose columns are split over `tp` and padded beyond `vocab_size`."""
    return lambda logits_Tv, labels_T, mask_T: _ShardedCrossEntropy.apply(
        logits_Tv, labels_T, mask_T, vocab_size, tp, mode
    )
