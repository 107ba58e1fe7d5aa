"""Inputs and bounds for kernels under Triton's interpreter, where every element can be checked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

# Largest relative error of a conversion from fp32. The interpreter cuts bf16 off; a GPU rounds to
# the nearest, with half the error.
ROUNDING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
# Of a grid in two dimensions: every value of each, or both whole.
WIDTHS = [False, pytest.param(True, marks=pytest.mark.slow)]
SUMS = 1e-4  # absolute, of some hundred products accumulated in fp32


def operand(seed: int, *shape: int, dtype: torch.dtype, exact: bool = False) -> Tensor:
    """Equal on every rank for equal seeds. `exact`: small integers, whose sums have no rounding."""
    generator = torch.Generator().manual_seed(seed)
    if exact:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def poison_new_tensors() -> None:
    """Uninitialised memory is NaN from here on: an element that nobody writes is found."""
    torch.use_deterministic_algorithms(True)
    assert torch.randn(2).new_empty(1000).isnan().all()


def worst(found: Tensor, wanted: Tensor, bound: Tensor) -> float:
    """The largest error in units of its bound: wrong above 1. NaN is wrong. No elements: 0."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    errors = (found.double() - wanted).abs() / bound
    return float(errors.nan_to_num(nan=float("inf")).max()) if errors.numel() else 0.0
