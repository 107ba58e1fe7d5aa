"""Rotary positions against their plain reference."""

from __future__ import annotations

import math

import pytest
import torch

from megascale.config import RopeScaling
from megascale.ops.rope import inverse_frequencies, rope_table, rotate, rotate_reference

F64 = torch.float64


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_rotation_is_a_complex_product_and_keeps_relative_positions() -> None:
    cos, sin = rope_table(6, 8, 10000.0, None, F64, torch.device("cpu"))
    x = torch.randn(2, 6, 3, 8, dtype=F64)
    torch.testing.assert_close(rotate(x, cos, sin), rotate_reference(x, cos, sin))
    same = torch.randn(8, dtype=F64).expand(1, 6, 1, 8)
    turned = rotate(same, cos, sin)[0, :, 0]
    products = turned @ turned.T  # depends on the distance of positions alone
    torch.testing.assert_close(products[0, 2], products[3, 5])
    torch.testing.assert_close(products[1, 1], same[0, 0, 0] @ same[0, 0, 0])


def test_rotation_of_bf16_uses_fp32_angles() -> None:
    cos, sin = rope_table(4096, 8, 10000.0, None, torch.bfloat16, torch.device("cpu"))
    assert cos.dtype == torch.float32
    x = torch.randn(1, 4096, 1, 8).bfloat16()
    expected = rotate_reference(x.float(), cos, sin)
    torch.testing.assert_close(rotate(x, cos, sin).float(), expected, rtol=1e-2, atol=1e-2)


def test_llama31_scaling_keeps_fast_and_stretches_slow_frequencies() -> None:
    scaling = RopeScaling(factor=8.0, original_max_seq_len=64)
    plain = inverse_frequencies(16, 10000.0, None, F64)
    scaled = inverse_frequencies(16, 10000.0, scaling, F64)
    wavelengths = 2 * math.pi / plain
    for before, after, wavelength in zip(plain, scaled, wavelengths, strict=True):
        if wavelength < 64 / 4.0:
            assert after == before
        elif wavelength > 64 / 1.0:
            assert after == before / 8.0
        else:
            assert before / 8.0 < after < before
