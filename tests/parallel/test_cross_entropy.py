"""Cross-entropy of sharded, padded logits against torch's on the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megascale.parallel.cross_entropy import sharded_cross_entropy
from megascale.parallel.tensor import TensorParallel, padded_vocab_rows
from tests.distributed import run_ranks

VOCAB, TOKENS = 100, 16  # of 4 ranks with 64 columns each, two hold padding alone
IGNORED = -100  # what a label may be where the mask is 0
SCALE = 0.125  # of the loss, as the training program scales it
CASES = ["plain", "masked", "all masked", "large", "equal", "far apart", "bfloat16"]
# Of the loss (relative) and of the gradient, by dtype of the logits: statistics of bf16 are fp32.
TOLERANCE = {torch.float64: (1e-13, 1e-13), torch.bfloat16: (1e-6, 2.0**-8)}
FLOATS = NDArray[np.float64]


def _inputs(case: str) -> tuple[Tensor, Tensor, Tensor]:
    """Whole logits, labels and mask."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    logits_TV = 3.0 * torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=generator)
    labels_T = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels_T[:4] = torch.tensor([0, 63, 64, 99])  # the edges of shards and vocabulary
    mask_T = torch.ones(TOKENS, dtype=torch.float64)
    match case:
        case "masked":
            mask_T[::3] = 0.0
            mask_T[1] = 0.5
            labels_T[::3] = IGNORED
        case "all masked":
            mask_T.zero_()
            labels_T.fill_(IGNORED)
        case "large":
            logits_TV *= 1e4
        case "equal":
            logits_TV.fill_(-7e5)
        case "far apart":  # e ** 2e4 overflows; the label is the largest, or the smallest
            logits_TV[:, 0], logits_TV[:, 99] = 1e4, -1e4
            labels_T[:8], labels_T[8:] = 0, 99
        case "bfloat16":
            logits_TV, mask_T = logits_TV.bfloat16(), mask_T.float()
    return logits_TV, labels_T, mask_T


def _loss(case: str, tp: TensorParallel) -> tuple[float, FLOATS]:
    """The loss, and the gradient of this rank's columns; padding columns hold garbage."""
    logits_TV, labels_T, mask_T = _inputs(case)
    cols = padded_vocab_rows(VOCAB, tp.size)
    padded_TV = F.pad(logits_TV, (0, cols * tp.size - VOCAB), value=torch.inf)
    leaf_Tv = padded_TV[:, tp.rank * cols : (tp.rank + 1) * cols].clone().requires_grad_()
    logits_Tv = leaf_Tv.view_as(leaf_Tv) * 1.0  # the loss may write over what it is given
    loss = sharded_cross_entropy(VOCAB, tp)(logits_Tv, labels_T, mask_T) * SCALE
    (grad_Tv,) = torch.autograd.grad(loss, logits_Tv)
    return loss.item(), grad_Tv.double().numpy()


def _run(rank: int, world_size: int) -> dict[str, tuple[float, FLOATS]]:
    tp = TensorParallel(dist.group.WORLD, rank, world_size)
    return {case: _loss(case, tp) for case in CASES}


def _check(by_rank: list[dict[str, tuple[float, FLOATS]]]) -> None:
    for case in CASES:
        logits_TV, labels_T, mask_T = _inputs(case)
        of_loss, of_gradient = TOLERANCE[logits_TV.dtype]
        # The log-sum-exp is one number, so its rounding grows with the logits.
        of_gradient += torch.finfo(torch.float64).eps * logits_TV.abs().max().item()
        logits_TV = logits_TV.double().requires_grad_()
        losses_T = F.cross_entropy(logits_TV, labels_T, reduction="none", ignore_index=IGNORED)
        expected = (losses_T * mask_T).sum() * SCALE
        expected.backward()
        assert logits_TV.grad is not None
        grad_TV = np.concatenate([found[case][1] for found in by_rank], axis=1)
        error = np.abs(grad_TV[:, :VOCAB] - logits_TV.grad.numpy()).max()
        assert error <= of_gradient * SCALE, (case, error)
        assert (grad_TV[:, VOCAB:] == 0.0).all(), case
        for found in by_rank:
            assert found[case][0] == by_rank[0][case][0], case  # every rank has the whole loss
            assert found[case][0] == pytest.approx(expected.item(), rel=of_loss), case


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_loss_equals_one_device_s(num_ranks: int) -> None:
    _check(run_ranks(_run, num_ranks))


def test_one_rank_needs_no_group() -> None:
    tp = TensorParallel(None, 0, 1)
    _check([{case: _loss(case, tp) for case in CASES}])
