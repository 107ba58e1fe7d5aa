"""Cross-entropy that keeps one buffer of logits, in pieces that a sharded vocabulary reuses.

Logits of a large vocabulary are the biggest tensor of a step (4096 tokens x 64000 in bf16: 0.5 GB);
a copy in fp32, a log-softmax and a gradient beside it would be five times that. Here the logits
stay in their dtype, statistics are fp32 (fp64 for fp64), and the backward pass writes the gradient
over the logits. They are read once forward (maximum and sum together, rescaled where a larger
maximum is met) and read and written once backward: Triton on CUDA (`kernel.py`), compiled for no
shape in particular; torch's operations on CPU, and in "plain" mode.

The pieces, for a slice of v vocabulary columns beginning at `vocab_start`; a sharded vocabulary
reduces between them (max, then one sum of two rows):
    row_statistics -> (all-reduce max) -> relative_to -> (all-reduce sum) -> write_gradient_
Columns at or after `num_valid` (global) are padding: they count as minus infinity.

Contract: `logits` belongs to the loss. Nothing may read it after the backward pass has begun.
T tokens, V or v vocabulary (whole, slice).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megascale.ops.checks import check_matrix
from megascale.ops.mode import OperatorMode, takes_kernels


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _takes_kernels(mode: OperatorMode, logits_Tv: Tensor) -> bool:
    """The kernels read along rows: logits whose columns lie apart are left to torch."""
    return logits_Tv.stride(1) == 1 and takes_kernels(mode, logits_Tv)


def local_valid(num_cols: int, vocab_start: int, num_valid: int) -> int:
    """How many of a slice's columns are real vocabulary."""
    return min(max(num_valid - vocab_start, 0), num_cols)


def row_statistics(
    logits_Tv: Tensor,
    labels_T: Tensor,
    vocab_start: int,
    num_valid_local: int,
    mode: OperatorMode = "fused",
) -> Tensor:
    """`[3, T]` of the slice's real columns: maximum (minus infinity where there are none), sum of
    exp(logit - that maximum), and the label's logit (0 if it is in another slice)."""
    if _takes_kernels(mode, logits_Tv):
        from megascale.ops.cross_entropy.launch import launch_statistics

        return launch_statistics(logits_Tv, labels_T, vocab_start, num_valid_local)
    wide = _wide(logits_Tv.dtype)
    if num_valid_local == 0:
        none_T = torch.zeros_like(logits_Tv[:, 0], dtype=wide)
        return torch.stack((none_T - math.inf, none_T, none_T))
    valid_Tv = logits_Tv[:, :num_valid_local].to(wide)
    max_T = valid_Tv.amax(dim=-1)
    local_labels_T, inside_T = _local_labels(labels_T, vocab_start, num_valid_local)
    target_T = logits_Tv.gather(1, local_labels_T[:, None])[:, 0].to(wide)
    sum_exp_T = (valid_Tv - max_T[:, None]).exp().sum(dim=-1)
    return torch.stack((max_T, sum_exp_T, torch.where(inside_T, target_T, 0.0)))


def relative_to(max_T: Tensor, statistics_3T: Tensor) -> Tensor:
    """`[2, T]`, which slices may add: sum of exp(logit - max) for a common maximum, and the label's
    logit."""
    own_max_T, sum_exp_T, target_T = statistics_3T.unbind(0)
    return torch.stack((sum_exp_T * (own_max_T - max_T).exp(), target_T))


def _local_labels(
    labels_T: Tensor, vocab_start: int, num_valid_local: int
) -> tuple[Tensor, Tensor]:
    """The label's column in the slice (0 if in another), and whether it is in the slice."""
    local_T = labels_T - vocab_start
    inside_T = (local_T >= 0) & (local_T < num_valid_local)
    return torch.where(inside_T, local_T, 0), inside_T


def write_gradient_(
    logits_Tv: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    scale_T: Tensor,
    vocab_start: int,
    num_valid_local: int,
    mode: OperatorMode = "fused",
) -> None:
    """Overwrite the logits with (softmax - one_hot(label)) * scale; padding columns with 0."""
    if _takes_kernels(mode, logits_Tv):
        from megascale.ops.cross_entropy.launch import launch_gradient

        launch_gradient(logits_Tv, labels_T, lse_T, scale_T, vocab_start, num_valid_local)
        return
    local_labels_T, inside_T = _local_labels(labels_T, vocab_start, num_valid_local)
    cols = torch.arange(logits_Tv.shape[1], device=logits_Tv.device)
    hit_Tv = (cols == local_labels_T[:, None]) & inside_T[:, None]
    softmax_Tv = (logits_Tv.to(lse_T.dtype) - lse_T[:, None]).exp()
    grad_Tv = (softmax_Tv - hit_Tv.to(lse_T.dtype)) * scale_T[:, None]
    logits_Tv.copy_(torch.where(cols < num_valid_local, grad_Tv, 0.0))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        mask_T: Tensor,
        num_valid: int,
        mode: OperatorMode,
    ) -> Tensor:
        max_T, sum_exp_T, target_T = row_statistics(logits_TV, labels_T, 0, num_valid, mode)
        log_sum_T = sum_exp_T.log()
        ctx.save_for_backward(logits_TV, labels_T, mask_T, max_T + log_sum_T)
        ctx.num_valid, ctx.mode = num_valid, mode
        # the difference first: a logit may be larger than the loss by all of its digits
        return ((log_sum_T + (max_T - target_T)) * mask_T).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, labels_T, mask_T, lse_T = ctx.saved_tensors
        grad_TV = logits_TV.detach()
        scale_T = grad_loss.to(lse_T.dtype) * mask_T
        write_gradient_(grad_TV, labels_T, lse_T, scale_T, 0, ctx.num_valid, ctx.mode)
        return grad_TV, None, None, None, None


def cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    mask_T: Tensor,
    num_valid: int | None = None,
    mode: OperatorMode = "fused",
) -> Tensor:
    """Sum over tokens of mask x (log-sum-exp - target logit); a scalar in fp32 (fp64 for fp64).

    labels_T   int64; where the mask is 0 any value is legal
    num_valid  columns that are real vocabulary; None: all
    Raises ValueError for tensors that do not fit each other.
    The caller divides by the global number of unmasked tokens: a mean of means would weigh ranks
    with few tokens too much.
    """
    check_matrix("cross_entropy", "logits", logits_TV)
    for name, values_T in (("labels", labels_T), ("mask", mask_T)):
        if values_T.shape != logits_TV.shape[:1] or values_T.device != logits_TV.device:
            raise ValueError(
                f"cross_entropy: {name} is {list(values_T.shape)} on {values_T.device} beside "
                f"logits {list(logits_TV.shape)} on {logits_TV.device}; give one value a row there"
            )
    num_valid = logits_TV.shape[1] if num_valid is None else num_valid
    return _CrossEntropy.apply(logits_TV, labels_T, mask_T, num_valid, mode)


def cross_entropy_reference(
    logits_TV: Tensor, labels_T: Tensor, mask_T: Tensor, num_valid: int | None = None
) -> Tensor:
    """The same through torch's log-softmax."""
    valid_TV = logits_TV[:, :num_valid].to(_wide(logits_TV.dtype))
    labels_T = torch.where(mask_T != 0, labels_T, 0)
    losses_T = torch.nn.functional.cross_entropy(valid_TV, labels_T, reduction="none")
    return (losses_T * mask_T).sum()
