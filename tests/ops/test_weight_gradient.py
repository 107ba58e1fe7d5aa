"""Weight gradients in fp32: the library's form, the Hopper kernel and its launch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.ops.weight_gradient import add_by_library, add_weight_gradient

SIZES = [(1, 3, 5), (64, 32, 48), (33, 7, 130)]


def operands(
    tokens: int, outs: int, ins: int, dtype: torch.dtype, count: int
) -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(tokens, outs).to(dtype), torch.randn(tokens, ins).to(dtype))
        for _ in range(count)
    ]


def wanted(start: Tensor, pairs: list[tuple[Tensor, Tensor]], *, overwrite: bool) -> Tensor:
    total = torch.stack([g.double().t() @ x.double() for g, x in pairs]).sum(0)
    return total if overwrite else start.double() + total


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_all_pairs_are_added_to_what_was_there(
    main_dtype: torch.dtype, dtype: torch.dtype, overwrite: bool, count: int
) -> None:
    for tokens, outs, ins in SIZES:
        pairs = operands(tokens, outs, ins, dtype, count)
        start = torch.randn(outs, ins, dtype=main_dtype)
        main_grad = start.clone()
        add_weight_gradient(main_grad, *pairs, overwrite=overwrite)
        torch.testing.assert_close(
            main_grad.double(), wanted(start, pairs, overwrite=overwrite), rtol=1e-5, atol=1e-4
        )


def test_overwriting_does_not_read_what_was_there() -> None:
    ((grad_y, x),) = operands(8, 4, 6, torch.float32, 1)
    main_grad = torch.full((4, 6), torch.nan)
    add_by_library(main_grad, grad_y, x, overwrite=True)
    assert main_grad.isfinite().all()


# ---------------------------------------------------------------- the kernel, without a GPU


def compiled(pairs: int, *, overwrite: bool) -> Any:
    pytest.importorskip("triton")
    from megascale.ops.weight_gradient.hopper import weight_gradient_hopper
    from megascale.ops.weight_gradient.launch import Tiles, arguments_of
    from tests.flux.ahead_of_time import compiled_gluon

    grad_y = torch.empty(256, 512, dtype=torch.bfloat16)
    x = torch.empty(256, 768, dtype=torch.bfloat16)
    arguments, constants, _ = arguments_of(
        torch.empty(512, 768), [(grad_y, x)] * pairs, Tiles(), overwrite=overwrite, num_sms=132
    )
    return compiled_gluon(weight_gradient_hopper, arguments, constants)


@pytest.mark.parametrize(("pairs", "overwrite"), [(1, False), (4, False), (2, True)])
def test_the_kernel_fits_and_does_not_spill(pairs: int, overwrite: bool) -> None:
    from tests.flux.ptx import usage

    used = usage(compiled(pairs, overwrite=overwrite))
    assert used.stack_bytes == 0
    assert used.shared_bytes <= 227 * 1024


def test_half_of_a_tile_is_added_by_the_tma_unit() -> None:
    """Gluon has no name for the instruction: this fails where the one that is used goes."""
    reductions = re.findall(
        r"cp\.reduce\.async\.bulk\.tensor.*add", compiled(1, overwrite=False).asm["ptx"]
    )
    assert len(reductions) == 4
    assert "cp.reduce" not in compiled(1, overwrite=True).asm["ptx"]


def _not_contiguous(t: Tensor) -> Tensor:
    return torch.empty(t.shape[0], 2 * t.shape[1], dtype=t.dtype)[:, : t.shape[1]]


def _another_length(t: Tensor) -> Tensor:
    return torch.empty(t.shape[0] + 1, t.shape[1], dtype=t.dtype)


@pytest.mark.parametrize(
    "spoilt", [_not_contiguous, _another_length, lambda t: t.float(), lambda t: t[:, :-1].clone()]
)
def test_what_the_kernel_does_not_take(spoilt: Callable[[Tensor], Tensor]) -> None:
    pytest.importorskip("triton")
    from megascale.ops.weight_gradient.launch import MOST_PAIRS, can_launch

    main_grad = torch.empty(16, 32)
    good = torch.empty(8, 16, dtype=torch.bfloat16), torch.empty(8, 32, dtype=torch.bfloat16)
    assert can_launch(main_grad, [good] * MOST_PAIRS)
    assert not can_launch(main_grad, [good] * (MOST_PAIRS + 1))
    assert not can_launch(main_grad, [good, (spoilt(good[0]), good[1])])
    assert not can_launch(main_grad, [good, (good[0], spoilt(good[1]))])
    assert not can_launch(main_grad.double(), [good])


# ---------------------------------------------------------------- the kernel, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_kernels_values(dtype: torch.dtype, count: int, overwrite: bool) -> None:
    from megascale.ops.weight_gradient.launch import launch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    for tokens, outs, ins in [
        (2048, 1024, 1536),
        (200, 264, 520),
        (64, 128, 256),
        (1, 8, 8),
        (4096, 384, 8),
    ]:
        pairs = [(g.cuda(), x.cuda()) for g, x in operands(tokens, outs, ins, dtype, count)]
        start = torch.randn(outs, ins, device="cuda")
        if overwrite:
            start[0, 0] = torch.nan
        found = [start.clone() for _ in range(2)]
        for main_grad in found:
            launch(main_grad, pairs, overwrite=overwrite, num_sms=132)
        expected = wanted(start, pairs, overwrite=overwrite)
        error = (found[0].double() - expected).norm() / expected.norm()
        assert error < 1e-4, (tokens, outs, ins)  # tensor cores cut the sums' last bits off
        assert torch.equal(*found), "two calls differ"
