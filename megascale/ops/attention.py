"""Causal attention with grouped heads and an optional sliding window (MegaScale 3.1).

Shapes: B sequences, S query positions, Z key positions (Z = S, or more with a key-value cache),
K query heads, G key-value heads (G divides K), H head dimension. The S queries are the last S of
the Z positions. `window` counts the token itself: a query at position p sees keys p - window + 1
to p.

Which kernel runs is decided here, by device and arguments, measured on an H200 (b 4, h 24, s 2048,
d 128, forward + backward):
- CUDA, causal: cuDNN (0.86 ms), then FlashAttention-2 (1.51 ms) where cuDNN does not support it;
- CUDA, window: FlexAttention with a cached block mask (window 768: 0.87 ms);
- CPU: torch's scaled_dot_product_attention, a boolean mask where there is a window;
- attention dropout: explicit scores, probabilities and mask, S x Z for each head. Slow and large;
  it exists because a counter-based mask gives the same run in every layout.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megascale.ops.cached import cached
from megascale.ops.random import dropout as drop_rows

_CUDA_PRIORITY = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of the probabilities; `row_ids_BKS` are global numbers of (token, head) rows."""

    p: float
    key: int
    row_ids_BKS: Tensor


def attention(
    q_BSKH: Tensor,
    k_BZGH: Tensor,
    v_BZGH: Tensor,
    *,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(H) + mask) v, as `[B, S, K, H]`."""
    num_queries, num_keys = q_BSKH.shape[1], k_BZGH.shape[1]
    if window is not None and window >= num_keys:
        window = None
    if dropout is not None:
        return attention_reference(q_BSKH, k_BZGH, v_BZGH, window=window, dropout=dropout)
    q, k, v = (x.transpose(1, 2) for x in (q_BSKH, k_BZGH, v_BZGH))
    if q.is_cuda and window is not None and num_queries == num_keys:
        return _window_cuda(q, k, v, window).transpose(1, 2)
    causal = window is None and num_queries == num_keys
    mask = None
    if not causal and (window is not None or num_queries > 1):
        mask = visible_mask(num_queries, num_keys, window, q.device)
    options: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]}
    if not q.is_cuda:
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, **options)
    else:
        with sdpa_kernel(_CUDA_PRIORITY, set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, **options)
    return y.transpose(1, 2)


@cached(maxsize=8)
def visible_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Boolean `[S, Z]`, true where a query sees a key."""
    queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    keys = torch.arange(num_keys, device=device)
    visible = keys <= queries
    return visible if window is None else visible & (queries - keys < window)


@functools.cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


@cached(maxsize=8)
def _window_block_mask(seq_len: int, window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    return create_block_mask(visible, None, None, seq_len, seq_len, device=device)


def _window_cuda(q_BKSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, window: int) -> Tensor:
    block_mask = _window_block_mask(q_BKSH.shape[2], window, q_BKSH.device)
    grouped = q_BKSH.shape[1] != k_BGSH.shape[1]
    y: Tensor = _compiled_flex_attention()(
        q_BKSH, k_BGSH, v_BGSH, block_mask=block_mask, enable_gqa=grouped
    )
    return y


def attention_reference(
    q_BSKH: Tensor,
    k_BZGH: Tensor,
    v_BZGH: Tensor,
    *,
    window: int | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """The formula with every intermediate in memory; also the path of attention dropout."""
    num_queries, num_heads, head_dim = q_BSKH.shape[1:]
    num_keys, kv_heads = k_BZGH.shape[1:3]
    k_BKHZ = k_BZGH.repeat_interleave(num_heads // kv_heads, dim=2).permute(0, 2, 3, 1)
    v_BKZH = v_BZGH.repeat_interleave(num_heads // kv_heads, dim=2).transpose(1, 2)
    scores_BKSZ = q_BSKH.transpose(1, 2) @ k_BKHZ / math.sqrt(head_dim)
    mask = visible_mask(num_queries, num_keys, window, q_BSKH.device)
    scores_BKSZ = scores_BKSZ.masked_fill(~mask, -math.inf)
    wide = torch.promote_types(scores_BKSZ.dtype, torch.float32)
    weights_BKSZ = torch.softmax(scores_BKSZ, dim=-1, dtype=wide).to(v_BZGH.dtype)
    if dropout is not None:
        weights_BKSZ = drop_rows(weights_BKSZ, dropout.p, dropout.key, dropout.row_ids_BKS)
    return (weights_BKSZ @ v_BKZH).transpose(1, 2)
