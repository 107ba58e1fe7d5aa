"""The activation with its bias: torch's form, the kernels interpreted, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.ops.activation import activation, activation_reference
from megascale.ops.column_split import split_columns
from megascale.ops.deferred import DeferredWork, deferring, run
from tests.ops.kernels import F64, interpreted, leaf, near, wide, with_main_grad

NAMES = ("gelu", "gelu_tanh", "swiglu")
names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@names
@pytest.mark.parametrize("mode", ["fused", "plain"])
def test_values_and_gradients_are_those_of_the_formula(name: str, mode: Any) -> None:
    x, bias = leaf(5, 8, dtype=F64), leaf(8, dtype=F64)
    wanted = activation_reference(name, x, bias)
    torch.testing.assert_close(activation(name, x, bias, mode), wanted)
    torch.testing.assert_close(activation(name, x, None, mode), activation_reference(name, x))
    assert torch.autograd.gradcheck(lambda x, b: activation(name, x, b, mode), (x, bias))
    assert torch.autograd.gradcheck(lambda x: activation(name, x, None, mode), (x,))


@names
def test_the_bias_gradient_of_bf16_goes_to_main_grad_in_fp32(name: str) -> None:
    x, bias = leaf(300, 16, dtype=torch.bfloat16), leaf(16, dtype=torch.bfloat16)
    with_main_grad(bias)
    grad = torch.randn_like(activation(name, x, bias))
    for _micro_batch in range(2):
        x.grad = None
        activation(name, x, bias).backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(
        bias.main_grad,  # type: ignore[attr-defined]
        1 + 2 * x.grad.float().sum(0),
    )
    assert bias.grad is None


def test_a_stale_main_grad_is_overwritten_and_a_deferred_one_is_left_for_later() -> None:
    x, bias = leaf(7, 4, dtype=F64), with_main_grad(leaf(4, dtype=F64), stale=True)
    bias.main_grad = torch.ones(4, dtype=F64)  # type: ignore[attr-defined]
    grad = torch.randn(7, 4, dtype=F64)
    work = DeferredWork()
    with deferring(work):
        activation("gelu", x, bias).backward(grad)
    assert torch.equal(bias.main_grad, torch.ones(4, dtype=F64))  # type: ignore[attr-defined]
    run([work], lambda weight, pairs: None)
    assert x.grad is not None
    torch.testing.assert_close(bias.main_grad, x.grad.sum(0))  # type: ignore[attr-defined]


@names
def test_a_frozen_bias_gets_no_gradient(name: str) -> None:
    x, bias = leaf(3, 4, dtype=F64), torch.randn(4, dtype=F64)
    activation(name, x, bias).sum().backward()
    assert x.grad is not None
    assert bias.grad is None


@names
def test_the_gradient_of_a_part_is_written_in_place(name: str) -> None:
    joined = leaf(6, 11, dtype=F64)
    (_, x), (_, part) = split_columns(joined, (3, 8))
    place = part.gradient()
    activation(name, x, None, part=part).sum().backward()
    cut = joined.detach()[:, 3:].clone().requires_grad_()
    activation(name, cut).sum().backward()
    assert cut.grad is not None
    torch.testing.assert_close(joined.grad, torch.nn.functional.pad(cut.grad, (3, 0)))
    torch.testing.assert_close(place, cut.grad)  # the very memory that was handed out


CASES = [(1, 6), (3, 256), (19, 24), (40, 602)]  # rows; columns of x, odd halves among them


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@names
def test_kernels_interpreted(name: str, dtype: torch.dtype) -> None:
    interpreted(_check, name, dtype, "cpu", CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@names
def test_kernels_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    _check(name, dtype, "cuda", [*CASES, (2048, 2050), (1031, 4096), (129, 22016)])


def _check(name: str, dtype: torch.dtype, device: str, cases: list[tuple[int, int]]) -> None:
    for rows, columns in cases:
        for with_bias in (True, False):
            for strided in (False, True):
                _check_case(name, dtype, device, rows, columns, with_bias, strided)
        _check_column_major(name, dtype, device, rows, columns)


def _check_column_major(name: str, dtype: torch.dtype, device: str, rows: int, cols: int) -> None:
    x = leaf(rows, cols, dtype=dtype).detach().to(device).requires_grad_()
    turned = x.detach().t().contiguous().t().requires_grad_()
    for each in (x, turned):
        activation(name, each).sum().backward()
    assert turned.grad is not None
    assert x.grad is not None
    assert torch.equal(turned.grad, x.grad)


def _check_case(
    name: str,
    dtype: torch.dtype,
    device: str,
    rows: int,
    columns: int,
    with_bias: bool,
    strided: bool,
) -> None:
    joined = leaf(rows, columns + 10 * strided, dtype=dtype, scale=2.0)
    joined = joined.detach().to(device).requires_grad_()
    bias = None
    if with_bias:
        biases = leaf(columns, 1 + strided, dtype=dtype).detach().to(device)
        bias = biases[:, 0].requires_grad_()
    (x, *_), (part, *_) = split_columns(joined, (columns, 10) if strided else (columns,))
    wide_x, wide_bias = wide(x), None if bias is None else wide(bias)
    wanted = activation_reference(name, wide_x, wide_bias)
    y = activation(name, x, bias, part=part if strided else None)
    assert y.dtype == dtype
    near(y, wanted, dtype)
    grad = torch.randn(rows, 2 * wanted.shape[1], device=device).to(dtype)[:, : wanted.shape[1]]
    wanted.backward(grad.double())
    assert wide_x.grad is not None
    if bias is not None:
        main = torch.ones(columns, device=device)
        bias.main_grad = main  # type: ignore[attr-defined]
    y.backward(grad)
    assert joined.grad is not None
    found: Tensor = joined.grad[:, :columns]
    near(found, wide_x.grad, dtype)
    assert not joined.grad[:, columns:].any()
    if bias is not None:
        sums = found.double().sum(0)  # what the kernel adds up are the rounded values
        near(main, 1 + sums, torch.float32, scale=float(found.abs().sum(0).max()) + 1)
        again = torch.ones(columns, device=device)
        bias.main_grad = again  # type: ignore[attr-defined]
        activation(name, joined[:, :columns], bias).backward(grad)
        assert torch.equal(again, main)
