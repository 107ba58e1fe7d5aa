"""Counter-based randomness against plain integers, and its independence of the layout."""

from __future__ import annotations

import math

import pytest
import torch

from megascale.ops.random import (
    bits,
    dropout,
    fill_normal_,
    keep_mask,
    normal,
    stream_key,
    uniform,
)
from megascale.shards import Box

MASK = (1 << 64) - 1


def _splitmix64(key: int, counter: int) -> int:
    """The published algorithm in Python's integers: its state is key + counter x golden."""
    z = (key + counter * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_bits_are_splitmix64() -> None:
    assert _splitmix64(1234567, 1) == 6457827717110365317  # the published first output
    key = stream_key(7, "name")
    counters = [0, 1, 2, 12345, 2**40 + 3, 2**62]
    got = bits(key, torch.tensor(counters)).tolist()
    assert [value & MASK for value in got] == [_splitmix64(key & MASK, c) for c in counters]


def test_streams_differ_by_seed_and_name_and_repeat() -> None:
    keys = {stream_key(seed, name) for seed in range(20) for name in ("a", "b", "c")}
    assert len(keys) == 60
    assert stream_key(1, "a") == stream_key(1, "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_uniform(dtype: torch.dtype) -> None:
    u = uniform(stream_key(0, "u"), torch.arange(100_000), dtype)
    assert u.dtype == dtype
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean().item() - 0.5) < 0.005
    histogram = torch.histc(u.float(), bins=10, min=0.0, max=1.0)
    assert (histogram / 10_000 - 1.0).abs().max() < 0.05


def test_normal_is_normal() -> None:
    z = normal(stream_key(0, "n"), torch.arange(200_000))
    assert abs(z.mean().item()) < 0.01
    assert abs(z.std().item() - 1.0) < 0.01
    assert abs((z**4).mean().item() - 3.0) < 0.1
    assert abs((z[1:] * z[:-1]).mean().item()) < 0.01
    inside = (z.abs() < 1.0).double().mean().item()
    assert abs(inside - math.erf(1 / math.sqrt(2))) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_box_of_a_parameter_gets_the_same_values(dtype: torch.dtype) -> None:
    whole = torch.empty(12, 10, dtype=dtype)
    fill_normal_(whole, 3, "w", Box((0, 0), (12, 10)), (12, 10), 0.02)
    for box in (Box((0, 0), (6, 10)), Box((3, 4), (5, 6)), Box((11, 9), (1, 1))):
        part = torch.empty(box.shape, dtype=dtype)
        fill_normal_(part, 3, "w", box, (12, 10), 0.02)
        (row, col), (rows, cols) = box.offset, box.shape
        assert torch.equal(part, whole[row : row + rows, col : col + cols])
    vector = torch.empty(10, dtype=dtype)
    fill_normal_(vector, 3, "b", Box((0,), (10,)), (10,), 1.0)
    tail = torch.empty(4, dtype=dtype)
    fill_normal_(tail, 3, "b", Box((6,), (4,)), (10,), 1.0)
    assert torch.equal(tail, vector[6:])


def test_slices_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Box((0, 0), (9, 7))
    whole, sliced = torch.empty(9, 7), torch.empty(9, 7)
    fill_normal_(whole, 0, "w", box, (9, 7), 1.0)
    monkeypatch.setattr("megascale.ops.random._SLICE_ELEMENTS", 16)
    fill_normal_(sliced, 0, "w", box, (9, 7), 1.0)
    assert torch.equal(whole, sliced)


def test_dropout_keeps_the_share_and_its_gradient_has_the_same_mask() -> None:
    x = torch.randn(500, 64, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(500) + 10_000
    y = dropout(x, 0.25, 99, rows)
    kept = y != 0
    assert abs(kept.double().mean().item() - 0.75) < 0.01
    torch.testing.assert_close(y[kept], x[kept] / 0.75)
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept.double() / 0.75)


def test_dropout_mask_depends_on_global_rows_and_columns_alone() -> None:
    x, rows = torch.ones(8, 6), torch.arange(8) * 1000
    whole = dropout(x, 0.5, 5, rows)
    assert torch.equal(dropout(x[3:5], 0.5, 5, rows[3:5]), whole[3:5])
    assert torch.equal(dropout(x[:, 2:], 0.5, 5, rows, col_offset=2), whole[:, 2:])
    assert not torch.equal(dropout(x, 0.5, 6, rows), whole)
    assert torch.equal(whole != 0, keep_mask(bits(5, rows), 6, 0.5))


def test_dropout_of_zero_is_the_same_tensor() -> None:
    x = torch.ones(2, 2)
    assert dropout(x, 0.0, 5, torch.arange(2)) is x
