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
from megascale.ops.embedding import accumulate_embedding_gradient
from megascale.parallel.tensor import TensorParallel


class _VocabularyEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_T: Tensor, weight_vD: Tensor, tp: TensorParallel) -> Tensor:
        rows = weight_vD.shape[0]
        local_T = tokens_T - tp.rank * rows
        own_T = (local_T >= 0) & (local_T < rows)
        # Tokens of other ranks add zeros below. They are spread over the table because a GPU sums
        # what goes to one row one by one: a row that took all of them would make the rest wait.
        row_T = torch.where(own_T, local_T, tokens_T % rows)
        ctx.save_for_backward(row_T, own_T)
        ctx.weight, ctx.tp = weight_vD, tp
        with tp.span("tp_embedding_reduce_scatter", group="tensor"):
            x_TD = weight_vD[row_T].mul_(own_T[:, None])
            with tp.span("tp_transfer", op="reduce_scatter", work="tp"):
                return reduce_scatter(x_TD, tp.group)

    @staticmethod
    def backward(ctx: Any, grad_tD: Tensor) -> tuple[Tensor | None, ...]:
        row_T, own_T = ctx.saved_tensors
        with ctx.tp.span("tp_embedding_backward", group="tensor"):
            with ctx.tp.span("tp_transfer", op="all_gather", work="tp"):
                grad_TD = all_gather(grad_tD, ctx.tp.group)
            # `where`, not a product: zero times an infinite gradient would be another row's NaN.
            own_TD = torch.where(own_T[:, None], grad_TD, 0.0)
            return None, accumulate_embedding_gradient(ctx.weight, row_T, own_TD), None


def vocabulary_embedding(tp: TensorParallel) -> Callable[[Tensor, Tensor], Tensor]:
    """The lookup `op(tokens_T, weight_vD) -> x_tD` of a vocabulary split over `tp`."""
    return lambda tokens_T, weight_vD: _VocabularyEmbedding.apply(tokens_T, weight_vD, tp)
