"""Rotary position embedding (Su et al. 2021), half-split: element i pairs with i + H/2.

This is the convention of Hugging Face's Llama; the interleaved one of the original code differs by
a permutation of the rows of q and k, and mixing them is a classic silent export bug.

Angles and the rotation are fp32 (fp64 where x is fp64), whatever the model's dtype: a bf16 angle is
off by whole turns at long positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.ops.cached import cached

if TYPE_CHECKING:
    from megascale.config import RopeScaling


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, dtype: torch.dtype
) -> Tensor:
    """Angle a position of each of the H/2 pairs; Llama 3.1's scaling stretches the slow ones."""
    exponents = torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    # turns in the original context: under `low` divide by factor, over `high` keep, else blend
    turns = scaling.original_max_seq_len * frequencies / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


@cached(maxsize=32)
def rope_table(
    seq_len: int,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each `[S, H/2]`, for an `x` of `dtype`; cached."""
    wide = torch.promote_types(dtype, torch.float32)
    with torch.device("cpu"):
        positions = torch.arange(seq_len, dtype=wide)
        angles = positions[:, None] * inverse_frequencies(head_dim, theta, scaling, wide)
    return angles.cos().to(device), angles.sin().to(device)


def rotate(x_BSKH: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + H/2]) by its position's angle; R = H/2."""
    first, second = x_BSKH.to(cos_SR.dtype).chunk(2, dim=-1)
    cos, sin = cos_SR[:, None], sin_SR[:, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BSKH.dtype)


def rotate_reference(x_BSKH: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """The same as a product of complex numbers."""
    half = x_BSKH.shape[-1] // 2
    pairs = torch.complex(x_BSKH[..., :half], x_BSKH[..., half:])
    turned = pairs * torch.complex(cos_SR, sin_SR)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)
