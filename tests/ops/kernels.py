"""Runs of Triton kernels that need no GPU: interpreted in a process of their own.

A process that has imported Triton to compile cannot interpret: `interpreted(fn, ...)` forks one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.flux.interpreted import ROUNDING, poison_new_tensors
from tests.flux.shared_arena import interpret_kernels

F64 = torch.float64


def interpreted(fn: Callable[..., None], *args: Any) -> None:
    """`fn(*args)` where operators take their kernels on CPU tensors, and new memory is NaN."""
    run_ranks(_interpreted, 1, fn, *args, timeout_s=110.0)


def _interpreted(rank: int, world_size: int, fn: Callable[..., None], *args: Any) -> None:
    from megascale.ops import mode

    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of masked lanes
    interpret_kernels()
    poison_new_tensors()
    torch.manual_seed(0)
    mode.runs_kernels = lambda tensor: tensor.dtype in mode.KERNEL_DTYPES
    fn(*args)


def near(found: Tensor, wanted: Tensor, dtype: torch.dtype, scale: float | None = None) -> None:
    """`found` is `wanted` (fp64) rounded to `dtype` once or twice, or summed in fp32 in another
    order: within that of the largest value (`scale`)."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    found, wanted = found.detach().double(), wanted.detach()
    scale = float(wanted.abs().max()) if scale is None else scale
    rounding = ROUNDING.get(dtype, 2.0**-20)
    bound = 2 * rounding * wanted.abs() + (rounding if dtype == torch.float32 else 1e-5) * scale
    worst = float(((found - wanted).abs() / bound.clamp_min(1e-30)).max())
    assert math.isfinite(worst), found
    assert worst <= 1.0, (worst, dtype, found.shape)


def leaf(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=F64) * scale).to(dtype).requires_grad_()


def wide(x: Tensor) -> Tensor:
    """The same values in fp64, as a leaf."""
    return x.detach().double().requires_grad_()


def with_main_grad(parameter: Tensor, stale: bool = False) -> Tensor:
    """`parameter` with a main gradient of ones, stale or to be added to."""
    parameter.main_grad = torch.ones(parameter.shape)  # type: ignore[attr-defined]
    parameter.main_grad_stale = stale  # type: ignore[attr-defined]
    return parameter
