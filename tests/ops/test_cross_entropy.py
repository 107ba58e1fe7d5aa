"""Cross-entropy in place against torch's, whole and in slices; kernels interpreted and on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.ops.cross_entropy import (
    cross_entropy,
    cross_entropy_reference,
    local_valid,
    relative_to,
    row_statistics,
    write_gradient_,
)
from tests.ops.kernels import interpreted, near

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
    statistics = [
        row_statistics(s, labels, start, n)
        for s, start, n in zip(slices, starts, valid, strict=True)
    ]
    max_T = torch.stack([of_slice[0] for of_slice in statistics]).amax(0)
    parts = [relative_to(max_T, of_slice) for of_slice in statistics]
    sum_exp_T, target_T = torch.stack(parts).sum(0).unbind(0)
    lse_T = max_T + sum_exp_T.log()
    torch.testing.assert_close(((lse_T - target_T) * mask).sum(), reference)
    for s, start, n in zip(slices, starts, valid, strict=True):
        write_gradient_(s, labels, lse_T, mask.to(lse_T.dtype), start, n)
    torch.testing.assert_close(torch.cat(slices, dim=1), expected)


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits * 1.0, torch.tensor([1]), torch.ones(1))
    assert loss.item() == 2e4
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert math.isclose(logits.grad[0, 0].item(), 1.0)


CASES = [(1, 3, 3), (5, 40, 33), (3, 5000, 4999)]  # tokens, columns, real ones


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_interpreted(dtype: torch.dtype) -> None:
    interpreted(_check, dtype, "cpu", CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu(dtype: torch.dtype) -> None:
    _check(dtype, "cuda", [*CASES, (2048, 32000, 32000), (100, 50304, 50257)])


def _check(dtype: torch.dtype, device: str, cases: list[tuple[int, int, int]]) -> None:
    for tokens, columns, num_valid in cases:
        logits = (torch.randn(tokens, columns + 8, device=device) * 4).to(dtype)
        logits[0, : num_valid // 2] -= 300  # the maximum comes late
        labels = torch.randint(0, num_valid, (tokens,), device=device)
        labels[-1] = -100
        for start in (0, num_valid // 3):  # the label is in the slice, or not
            _check_slice(dtype, logits[:, :columns], labels, start, num_valid)
        if dtype == torch.float32:
            _check_column_major(logits[:, :columns], labels.clamp_min(0), num_valid)
        nothing = row_statistics(logits, labels, columns, 0)
        assert nothing[0].eq(-math.inf).all()
        assert not nothing[1:].any()


def _check_column_major(logits: Tensor, labels: Tensor, num_valid: int) -> None:
    """Logits as `(weight @ hidden.t()).t()` gives them."""
    by_columns = logits.t().contiguous().t().requires_grad_()
    by_rows, mask = logits.clone().requires_grad_(), torch.ones(len(labels), device=logits.device)
    for leaf in (by_rows, by_columns):
        cross_entropy(leaf.view_as(leaf), labels, mask, num_valid).backward()
    assert by_columns.grad is not None
    torch.testing.assert_close(by_columns.grad, by_rows.grad)


def _check_slice(
    dtype: torch.dtype, logits: Tensor, labels: Tensor, start: int, num_valid: int
) -> None:
    wide, local = logits.double(), labels - start
    inside = (local >= 0) & (local < num_valid)
    found = row_statistics(logits, labels, start, num_valid)
    top = wide[:, :num_valid].amax(-1)
    sums = (wide[:, :num_valid] - top[:, None]).exp().sum(-1)
    target = wide.gather(1, local.clamp(0, num_valid - 1)[:, None])[:, 0] * inside
    assert torch.equal(found[0].double(), top)
    near(found[1], sums, torch.float32)
    assert torch.equal(found[2].double(), target)
    lse, scale = (top + sums.log()).float(), torch.rand_like(found[0])
    scale[0] = 0.0
    gradient = (wide - lse.double()[:, None]).exp()
    gradient[inside, local[inside]] -= 1.0
    gradient = gradient * scale.double()[:, None]
    gradient[:, num_valid:] = 0.0
    owned = torch.cat((logits, logits), dim=1)[:, : logits.shape[1]]
    beside = owned._version
    write_gradient_(owned, labels, lse, scale, start, num_valid)
    near(owned, gradient, dtype)
    assert owned._version > beside
