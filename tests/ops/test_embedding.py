"""The lookup against torch's, with repeated tokens, and accumulation into main gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megascale.ops.embedding import embedding

TOKENS = torch.tensor([3, 0, 3, 5, 3, 0])


def test_values_and_gradient_equal_torch() -> None:
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(embedding(TOKENS, weight), F.embedding(TOKENS, weight))
    (got,) = torch.autograd.grad(embedding(TOKENS, weight), weight, grad)
    (expected,) = torch.autograd.grad(F.embedding(TOKENS, weight), weight, grad)
    torch.testing.assert_close(got, expected)


def test_rows_accumulate_in_the_main_gradient() -> None:
    weight = torch.randn(7, 4).bfloat16().requires_grad_()
    weight.main_grad = torch.ones(7, 4)  # type: ignore[attr-defined]
    expected = torch.ones(7, 4)
    for _ in range(2):
        grad = torch.randn(6, 4).bfloat16()
        embedding(TOKENS, weight).backward(grad)
        for token, row in zip(TOKENS.tolist(), grad.float(), strict=True):
            expected[token] += row
    torch.testing.assert_close(weight.main_grad, expected)  # type: ignore[attr-defined]
    assert weight.grad is None
