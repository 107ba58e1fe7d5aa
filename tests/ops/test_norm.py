"""Residual sum and norm: torch's form, the kernels interpreted, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.ops.norm import layer_norm_reference, residual_norm, rms_norm_reference
from tests.ops.kernels import F64, interpreted, leaf, near, wide, with_main_grad

EPS = 1e-5
kinds = pytest.mark.parametrize("layer_norm", [True, False], ids=["layernorm", "rmsnorm"])
modes = pytest.mark.parametrize("mode", ["fused", "plain"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _reference(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    if bias is None:
        return total, rms_norm_reference(total, weight, EPS)
    return total, layer_norm_reference(total, weight, bias, EPS)


@kinds
@modes
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_values_are_those_of_the_formulas(layer_norm: bool, mode: Any, dtype: torch.dtype) -> None:
    x, branch = leaf(7, 33, dtype=dtype, scale=3.0), leaf(7, 33, dtype=dtype)
    weight, bias = leaf(33, dtype=dtype), leaf(33, dtype=dtype) if layer_norm else None
    for added in (branch, None):
        found = residual_norm(x, added, weight, bias, EPS, mode)
        for got, wanted in zip(found, _reference(x, added, weight, bias), strict=True):
            torch.testing.assert_close(got, wanted)


@kinds
@modes
def test_gradients_of_both_results_meet(layer_norm: bool, mode: Any) -> None:
    x, branch, weight = leaf(4, 6, dtype=F64), leaf(4, 6, dtype=F64), leaf(6, dtype=F64)
    bias = (leaf(6, dtype=F64),) if layer_norm else ()

    def of_sum(x: Tensor, branch: Tensor, weight: Tensor, *bias: Tensor) -> Any:
        return residual_norm(x, branch, weight, bias[0] if bias else None, EPS, mode)

    def of_x(x: Tensor, weight: Tensor, *bias: Tensor) -> Any:
        return residual_norm(x, None, weight, bias[0] if bias else None, EPS, mode)

    assert torch.autograd.gradcheck(of_sum, (x, branch, weight, *bias))
    assert torch.autograd.gradcheck(of_x, (x, weight, *bias))
    for result in (0, 1):  # one of the two gradients is absent
        assert torch.autograd.gradcheck(
            lambda *a, r=result: of_sum(*a)[r], (x, branch, weight, *bias)
        )


def test_statistics_of_bf16_are_not_bf16() -> None:
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    _, y = residual_norm(x, None, torch.ones(4096, dtype=torch.bfloat16), None, EPS)
    torch.testing.assert_close(y, torch.ones_like(y))


@kinds
def test_parameter_gradients_of_bf16_go_to_main_grad_in_fp32(layer_norm: bool) -> None:
    low = torch.bfloat16
    x, weight = leaf(500, 8, dtype=low), with_main_grad(leaf(8, dtype=low))
    bias = with_main_grad(leaf(8, dtype=low), stale=True) if layer_norm else None
    wide_weight, wide_bias = wide(weight), None if bias is None else wide(bias)
    grad = torch.randn(500, 8, dtype=F64)
    _, y = residual_norm(x, None, weight, bias, EPS)
    y.backward(grad.to(low))
    _reference(wide(x), None, wide_weight, wide_bias)[1].backward(grad.to(low).double())
    assert wide_weight.grad is not None
    near(weight.main_grad, 1 + wide_weight.grad, torch.float32, 500)  # type: ignore[attr-defined]
    assert weight.grad is None
    if bias is not None and wide_bias is not None and wide_bias.grad is not None:
        near(bias.main_grad, wide_bias.grad, torch.float32, 500)  # type: ignore[attr-defined]
        assert bias.grad is None


CASES = [(1, 8), (11, 130)]


@pytest.mark.full
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_interpreted(dtype: torch.dtype, layer_norm: bool) -> None:
    interpreted(_check, dtype, layer_norm, "cpu", CASES)


@pytest.mark.full
def test_kernels_interpreted_on_rows_of_several_blocks() -> None:
    interpreted(_check, torch.float32, True, "cpu", [(3, 9000)])
    interpreted(_check, torch.bfloat16, False, "cpu", [(2, 12288)])
    interpreted(_check, torch.float32, True, "cpu", [(2, 16384)])  # the bias is summed apart


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu(dtype: torch.dtype, layer_norm: bool) -> None:
    more = [(300, 16), (1024, 12288), (2048, 4096), (777, 5120), (64, 16384), (40, 20000)]
    _check(dtype, layer_norm, "cuda", CASES + more)


def _check(dtype: torch.dtype, layer_norm: bool, device: str, cases: list[tuple[int, int]]) -> None:
    from megascale.ops.norm import launch

    if device == "cpu":
        launch.PROGRAMS = 2  # several rows a program
    for rows, columns in cases:
        for with_branch, with_sum in ((True, True), (True, False), (False, True)):
            _check_case(dtype, layer_norm, device, rows, columns, with_branch, with_sum)
        _check_strided(dtype, layer_norm, device, rows, columns)


def _check_strided(
    dtype: torch.dtype, layer_norm: bool, device: str, rows: int, columns: int
) -> None:
    """Values and gradients are those of the same tensors laid out contiguously, bit by bit."""
    wide_x, grads = torch.randn(3, rows, 2 * columns, device=device).to(dtype), []
    vectors = torch.randn(columns, 2, device=device).to(dtype)
    for contiguous in (True, False):
        x, branch, grad = (each[:, ::2].detach().requires_grad_() for each in wide_x)
        weight, bias = (vectors[:, i].detach().requires_grad_() for i in (0, 1))
        given = [x, branch, weight, bias]
        if contiguous:
            given = [each.detach().contiguous().requires_grad_() for each in given]
        x, branch, weight, bias = given
        total, y = residual_norm(x, branch, weight, bias if layer_norm else None, EPS)
        torch.autograd.backward([total, y], [grad.detach(), grad.detach()])
        grads.append([total, y, *(each.grad for each in given if each.grad is not None)])
    assert len(grads[0]) == len(grads[1]) == 6 - (not layer_norm)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def _check_case(
    dtype: torch.dtype,
    layer_norm: bool,
    device: str,
    rows: int,
    columns: int,
    with_branch: bool,
    with_sum: bool,
) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    x, weight = random(rows, columns), random(columns)
    branch = random(rows, columns) if with_branch else None
    bias = random(columns) if layer_norm else None
    weight.main_grad = torch.ones(columns, device=device)  # type: ignore[attr-defined]
    total, y = residual_norm(x, branch, weight, bias, EPS)
    # statistics are of the rounded sum
    wide_x = total.detach().double().requires_grad_()
    wide_weight, wide_bias = wide(weight), None if bias is None else wide(bias)
    _, wanted = _reference(wide_x, None, wide_weight, wide_bias)
    near(y, wanted, dtype)
    if branch is not None:
        near(total, x.double() + branch.double(), dtype)
    grad_y, grad_sum = random(rows, columns).detach(), random(rows, columns).detach()
    wanted.backward(grad_y.double())
    assert wide_x.grad is not None
    assert wide_weight.grad is not None
    results, grads = [y], [grad_y]
    if with_sum:
        results.append(total)
        grads.append(grad_sum)
        wide_x.grad += grad_sum.double()
    torch.autograd.backward(results, grads)
    assert x.grad is not None
    near(x.grad, wide_x.grad, dtype, 8 * float(wide_x.grad.abs().max()))
    if branch is not None:
        assert branch.grad is not None
        assert torch.equal(branch.grad, x.grad)
    scale = 4.0 * rows
    near(weight.main_grad, 1 + wide_weight.grad, torch.float32, scale)  # type: ignore[attr-defined]
    if bias is not None and wide_bias is not None:
        assert bias.grad is not None
        assert wide_bias.grad is not None
        near(bias.grad, wide_bias.grad, dtype, scale)
