"""Linear layers against torch's, and accumulation into main gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.ops.linear import (
    accumulate_bias_gradient,
    accumulate_weight_gradient,
    linear,
    linear_pair,
)

F64 = torch.float64


def _leaf(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("with_bias", [True, False])
def test_linear_has_torch_values_and_gradients(with_bias: bool) -> None:
    x, weight, bias = _leaf(5, 3), _leaf(4, 3), _leaf(4) if with_bias else None
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    inputs = (x, weight, bias) if bias is not None else (x, weight)
    assert torch.autograd.gradcheck(linear, inputs)


def test_linear_pair_is_the_sum_of_two_linears() -> None:
    a, b, bias = _leaf(5, 3), _leaf(5, 6), _leaf(4)
    weight_a, weight_b = _leaf(4, 3), _leaf(4, 6)
    expected = F.linear(a, weight_a, bias) + F.linear(b, weight_b)
    torch.testing.assert_close(linear_pair(a, weight_a, b, weight_b, bias), expected)
    assert torch.autograd.gradcheck(linear_pair, (a, weight_a, b, weight_b, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_two_micro_batches_accumulate_in_main_grad(dtype: torch.dtype) -> None:
    weight, bias = _leaf(4, 3, dtype=dtype), _leaf(4, dtype=dtype)
    weight.main_grad = torch.zeros(4, 3)  # type: ignore[attr-defined]
    bias.main_grad = torch.zeros(4)  # type: ignore[attr-defined]
    expected_weight, expected_bias = torch.zeros(4, 3), torch.zeros(4)
    for _ in range(2):
        x, grad = _leaf(5, 3, dtype=dtype), torch.randn(5, 4).to(dtype)
        linear(x, weight, bias).backward(grad)
        expected_weight += grad.float().t() @ x.detach().float()
        expected_bias += grad.float().sum(0)
        torch.testing.assert_close(x.grad, grad @ weight.detach())
    torch.testing.assert_close(weight.main_grad, expected_weight)  # type: ignore[attr-defined]
    torch.testing.assert_close(bias.main_grad, expected_bias)  # type: ignore[attr-defined]
    assert weight.grad is None
    assert bias.grad is None


def test_main_grad_is_found_under_activation_checkpointing() -> None:
    weight, x = _leaf(4, 3), _leaf(5, 3)
    weight.main_grad = torch.zeros(4, 3, dtype=F64)  # type: ignore[attr-defined]
    y = torch.utils.checkpoint.checkpoint(linear, x, weight, use_reentrant=False)
    y.sum().backward()
    expected = x.detach().sum(0).expand(4, 3)
    torch.testing.assert_close(weight.main_grad, expected)  # type: ignore[attr-defined]


def test_pieces_return_gradients_where_there_is_no_main_grad() -> None:
    weight, bias, x, grad = _leaf(4, 3), _leaf(4), _leaf(5, 3).detach(), _leaf(5, 4).detach()
    torch.testing.assert_close(accumulate_weight_gradient(weight, grad, x), grad.t() @ x)
    torch.testing.assert_close(accumulate_bias_gradient(bias, grad), grad.sum(0))


def test_bias_of_bf16_is_summed_in_fp32() -> None:
    grad = torch.full((4096, 1), 1.0 + 2**-7, dtype=torch.bfloat16)  # a bf16 sum would stall
    bias = torch.zeros(1, dtype=torch.bfloat16)
    bias.main_grad = torch.zeros(1)  # type: ignore[attr-defined]
    accumulate_bias_gradient(bias, grad)
    assert bias.main_grad.item() == 4096 * (1.0 + 2**-7)  # type: ignore[attr-defined]
