"""Vocabulary-parallel embedding (Megatron-LM, 1909.08053, section 3), in the token-sharded form.

Each tensor-parallel rank stores a slice of the vocabulary's rows. Looking up gives zeros for tokens
of other ranks; the reduce-scatter that sums them also hands every rank its own token rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megascale.flux.collectives import all_gather, reduce_scatter
from megascale.parallel.tensor import TensorParallel


class _VocabularyEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, weight_vD: Tensor, tp: TensorParallel) -> Tensor:
        rows = weight_vD.shape[0]
        local_T = tokens_T - tp.rank * rows
        own_T = (local_T >= 0) & (local_T < rows)
        # Rows of other ranks get a zero gradient below. Spreading them over the table instead of
        # sending them all to row 0 keeps the atomic additions of a GPU from queueing.
        row_T = torch.where(own_T, local_T, tokens_T % rows)
        ctx.save_for_backward(row_T, own_T)
        ctx.weight, ctx.tp = weight_vD, tp
        with tp.span("tp_embedding_reduce_scatter", group="tensor"):
            x_TD = weight_vD[row_T].mul_(own_T[:, None])
            return reduce_scatter(x_TD, tp.group)

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:
        row_T, own_T = ctx.saved_tensors
        with ctx.tp.span("tp_embedding_backward", group="tensor"):
            grad_TD = all_gather(grad_tD, ctx.tp.group)
            main_grad = getattr(ctx.weight, "main_grad", None)
            target = torch.zeros_like(ctx.weight) if main_grad is None else main_grad
            target.index_add_(0, row_T, grad_TD.to(target.dtype).mul_(own_T[:, None]))
        return None, (target if main_grad is None else None), None


def vocabulary_embedding(tp: TensorParallel) -> Callable[[Tensor, Tensor], Tensor]:
    """The lookup `op(tokens_T, weight_vD) -> x_tD` of a vocabulary split over `tp`."""
    return lambda tokens_T, weight_vD: _VocabularyEmbedding.apply(tokens_T, weight_vD, tp)
