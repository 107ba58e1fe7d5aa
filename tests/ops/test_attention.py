"""Attention against the formula on dense masks: causal, window, grouped heads, cache, dropout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megascale.ops.attention import AttentionDropout, attention, attention_reference, visible_mask
from megascale.ops.random import bits, keep_mask

F64 = torch.float64


def _qkv(
    num_queries: int, num_keys: int, heads: int, kv_heads: int, dtype: torch.dtype = F64
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = torch.randn(2, num_queries, heads, 8, dtype=dtype, requires_grad=True)
    k = torch.randn(2, num_keys, kv_heads, 8, dtype=dtype, requires_grad=True)
    v = torch.randn(2, num_keys, kv_heads, 8, dtype=dtype, requires_grad=True)
    return q, k, v


def _by_hand(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One query and head at a time, over exactly the keys that it sees."""
    y = torch.empty_like(q)
    shift, share = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            stop = shift + s + 1
            seen = slice(0 if window is None else max(0, stop - window), stop)
            for h in range(q.shape[2]):
                scores = k[b, seen, h // share] @ q[b, s, h] / math.sqrt(q.shape[-1])
                y[b, s, h] = scores.softmax(0) @ v[b, seen, h // share]
    return y


@pytest.mark.parametrize("window", [None, 1, 3, 12, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_sees_exactly_its_keys(window: int | None, kv_heads: int) -> None:
    q, k, v = _qkv(12, 12, 4, kv_heads)
    expected = _by_hand(q, k, v, window)
    torch.testing.assert_close(attention(q, k, v, window=window), expected)
    torch.testing.assert_close(attention_reference(q, k, v, window=window), expected)


@pytest.mark.parametrize("num_queries", [1, 3])
@pytest.mark.parametrize("window", [None, 2, 5])
def test_queries_are_the_last_of_the_keys(num_queries: int, window: int | None) -> None:
    q, k, v = _qkv(num_queries, 9, 4, 2)
    torch.testing.assert_close(attention(q, k, v, window=window), _by_hand(q, k, v, window))


@pytest.mark.parametrize("window", [None, 3])
def test_gradients_equal_the_reference(window: int | None) -> None:
    inputs = _qkv(10, 10, 4, 2)
    weights = torch.randn(2, 10, 4, 8, dtype=F64)
    grads = torch.autograd.grad((attention(*inputs, window=window) * weights).sum(), inputs)
    reference = (attention_reference(*inputs, window=window) * weights).sum()
    for got, expected in zip(grads, torch.autograd.grad(reference, inputs), strict=True):
        torch.testing.assert_close(got, expected)


def test_window_counts_the_token_itself() -> None:
    mask = visible_mask(4, 4, 2, torch.device("cpu"))
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_dropout_zeroes_probabilities_by_global_rows() -> None:
    q, k, v = _qkv(6, 6, 4, 4)
    rows = torch.arange(2 * 4 * 6).view(2, 4, 6) * 17
    y = attention(q, k, v, dropout=AttentionDropout(0.5, 11, rows))
    keep = keep_mask(bits(11, rows), 6, 0.5)
    scores = torch.einsum("bskh,bzkh->bksz", q, k) / math.sqrt(8)
    scores = scores.masked_fill(~visible_mask(6, 6, None, q.device), -math.inf)
    weights = scores.softmax(-1) * keep / 0.5
    torch.testing.assert_close(y, torch.einsum("bksz,bzkh->bskh", weights, v))
    half = AttentionDropout(0.5, 11, rows[:, 2:])  # the same heads on another rank
    part = attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], dropout=half)
    torch.testing.assert_close(part, y[:, :, 2:])


def test_bf16_is_close_to_fp64() -> None:
    q, k, v = _qkv(16, 16, 4, 2)
    low = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), window=5)
    torch.testing.assert_close(low.double(), attention(q, k, v, window=5), rtol=5e-2, atol=5e-2)
