"""Cross-entropy in place against torch's, whole and in slices of the vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.ops.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    local_valid,
    row_max,
    sum_exp_and_target,
    write_gradient_,
)

TOKENS, VOCAB, PADDED = 9, 13, 16


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (torch.randn(TOKENS, PADDED) * 4).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,))
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.0, 1.0, 1.0, 1.0])
    labels[1] = -100  # masked: any value is legal
    return logits, labels, mask


@pytest.mark.parametrize("num_valid", [None, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_loss_and_gradient_equal_torch(dtype: torch.dtype, num_valid: int | None) -> None:
    logits, labels, mask = _inputs(dtype)
    reference = cross_entropy_reference(logits, labels, mask, num_valid)
    (expected,) = torch.autograd.grad(reference / 3, logits)
    owned = logits.detach().clone().requires_grad_()
    loss = cross_entropy(owned, labels, mask, num_valid)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss, reference)
    (loss / 3).backward()
    assert owned.grad is not None
    torch.testing.assert_close(owned.grad, expected)


def test_the_gradient_is_written_over_the_logits() -> None:
    logits, labels, mask = _inputs(torch.float32)
    owned = logits * 1.0
    (grad,) = torch.autograd.grad(cross_entropy(owned, labels, mask), owned)
    assert grad.data_ptr() == owned.data_ptr()


def test_a_second_backward_is_refused() -> None:
    logits, labels, mask = _inputs(torch.float32)
    loss = cross_entropy(logits * 1.0, labels, mask)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("num_slices", [2, 4, 8])  # of 8, the last slice is padding alone
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_slices_compose_to_the_whole(dtype: torch.dtype, num_slices: int) -> None:
    logits, labels, mask = _inputs(dtype)
    reference = cross_entropy_reference(logits, labels, mask, VOCAB)
    (expected,) = torch.autograd.grad(reference, logits)
    width = PADDED // num_slices
    slices = [s.clone() for s in logits.detach().split(width, dim=1)]
    starts = [i * width for i in range(num_slices)]
    valid = [local_valid(width, start, VOCAB) for start in starts]
    maxima = [row_max("fused", s, n) for s, n in zip(slices, valid, strict=True)]
    max_T = torch.stack(maxima).amax(0)
    parts = [
        sum_exp_and_target("fused", s, labels, max_T, start, n)
        for s, start, n in zip(slices, starts, valid, strict=True)
    ]
    sum_exp_T, target_T = torch.stack(parts).sum(0).unbind(0)
    loss = ((sum_exp_T.log() - target_T) * mask).sum()
    torch.testing.assert_close(loss, reference)
    lse_T = max_T + sum_exp_T.log()
    for s, start, n in zip(slices, starts, valid, strict=True):
        write_gradient_("fused", s, labels, lse_T, mask.to(lse_T.dtype), start, n)
    torch.testing.assert_close(torch.cat(slices, dim=1), expected)


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits * 1.0, torch.tensor([1]), torch.ones(1))
    assert loss.item() == 2e4
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert math.isclose(logits.grad[0, 0].item(), 1.0)
