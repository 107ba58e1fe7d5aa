"""Causal attention with grouped heads, an optional sliding window (MegaScale 3.1) and documents
that do not see each other (`ops/documents.py`).

Shapes: B sequences, S query positions, Z key positions (Z = S, or more with a key-value cache),
K query heads, G key-value heads (G divides K), H head dimension. The S queries are the last S of
the Z positions. `window` counts the token itself: a query at position p sees keys p - window + 1
to p.

Which kernel runs is decided here, by mode, device and arguments. The choice for training (S = Z) on
CUDA, with the times that it rests on: H200, bf16, head dimension 128, forward + backward in ms.

| mode | mask | kernel | b 4, h 24, s 2048 | b 1, h 32, s 8192 |
|---|---|---|---|---|
| fused | causal | cuDNN | 0.86 | 3.61 |
| fused | window of 768, 2048 | FlexAttention, a cached block mask | 0.87 | 2.40 |
| plain | causal | FlashAttention-2 | 1.51 | |
| plain | window | FlashAttention-2 with its own window | | |

FlexAttention without a window took 1.17 and 4.94 ms, so it is not for causal attention. Neither
torch's interface to cuDNN nor its scaled_dot_product_attention has a window; its attention of
packed sequences (`varlen_attn`) has FlashAttention-2's. Grouped heads (GQA) go to all but the last
row's kernel without being repeated. Head dimensions: cuDNN takes multiples of 8 up to 128 (some
versions more), FlashAttention-2 up to 256; where a kernel refuses, torch takes the next of the list
(`_PRIORITY`), for fused FlashAttention-2, then memory-efficient, then scores. FlexAttention
is asked for powers of 2 from 16 on; other head dimensions with a window run as in plain mode. What
FlashAttention-2 does not take (fp32, wide or odd heads) runs with a mask `[S, S]`, keys and values
repeated, which made a step of the 175B-wide layers 9 % slower at s 2048.

With documents, in either mode, bf16 on CUDA runs FlashAttention-2's attention of packed sequences:
each document's part of a sequence is one, so no mask is made and no block outside a document is
computed, forward or backward, and the window comes with it. (FlexAttention would need a block mask
of every micro-batch, made on the device. `benchmarks/document_mask.py` times both.) Where each
sequence is of one document the table above holds.

Elsewhere:
- generation on CUDA (S < Z): the same list, a boolean mask where S > 1;
- CPU: torch's scaled_dot_product_attention, a boolean mask where there is a window or documents, of
  `[B, 1, S, S]` with documents, made once a micro-batch; so is what FlashAttention-2 does not take;
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
from megascale.ops.documents import Documents
from megascale.ops.mode import OperatorMode
from megascale.ops.random import dropout as drop_rows

_PLAIN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_PRIORITY: dict[OperatorMode, list[SDPBackend]] = {
    "fused": [SDPBackend.CUDNN_ATTENTION, *_PLAIN],
    "plain": _PLAIN,
}


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
    documents: Documents | None = None,
    dropout: AttentionDropout | None = None,
    mode: OperatorMode = "fused",
) -> Tensor:
    """softmax(q k^T / sqrt(H) + mask) v, as `[B, S, K, H]`; with `documents`, S = Z."""
    num_queries, num_keys = q_BSKH.shape[1], k_BZGH.shape[1]
    if window is not None and window >= num_keys:
        window = None
    if documents is not None and documents.are_sequences:
        documents = None
    if dropout is not None:
        return attention_reference(
            q_BSKH, k_BZGH, v_BZGH, window=window, documents=documents, dropout=dropout
        )
    if documents is not None:
        return _inside_documents(q_BSKH, k_BZGH, v_BZGH, documents, window, mode)
    q, k, v = (x.transpose(1, 2) for x in (q_BSKH, k_BZGH, v_BZGH))
    causal = window is None and num_queries == num_keys
    if window is not None and num_queries == num_keys and _takes_flex(q, mode):
        return _window_cuda(q, k, v, window).transpose(1, 2)
    if window is not None and num_queries == num_keys and _takes_flash(q_BSKH):
        bounds = _starts_B(len(q_BSKH), num_keys, q_BSKH.device)
        return _flash(q_BSKH, k_BZGH, v_BZGH, bounds, num_keys, window)
    mask = None
    if not causal and (window is not None or num_queries > 1):
        mask = visible_mask(num_queries, num_keys, window, q.device)
    return _scaled_dot_product(q, k, v, mask, mode).transpose(1, 2)


def _inside_documents(
    q_BSKH: Tensor,
    k_BSGH: Tensor,
    v_BSGH: Tensor,
    documents: Documents,
    window: int | None,
    mode: OperatorMode,
) -> Tensor:
    assert q_BSKH.shape[1] == k_BSGH.shape[1], "documents are of training: no cache, S = Z"
    if window is not None and window >= documents.longest:
        window = None
    if _takes_flash(q_BSKH):
        bounds, longest = documents.bounds_N, documents.longest
        return _flash(q_BSKH, k_BSGH, v_BSGH, bounds, longest, window)
    q, k, v = (x.transpose(1, 2) for x in (q_BSKH, k_BSGH, v_BSGH))
    return _scaled_dot_product(q, k, v, documents.visible(window), mode).transpose(1, 2)


def _scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mode: OperatorMode
) -> Tensor:
    """Heads before positions; without a mask, causal where there are as many queries as keys."""
    causal = mask is None and q.shape[2] == k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)
    if grouped and mask is not None:  # of the kernels that take a mask, only cuDNN's takes groups
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    with sdpa_kernel(_PRIORITY[mode], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=grouped)


def _takes_flex(q_BKSH: Tensor, mode: OperatorMode) -> bool:
    head_dim = q_BKSH.shape[-1]
    return mode == "fused" and q_BKSH.is_cuda and head_dim >= 16 and head_dim.bit_count() == 1


def _takes_flash(q_BSKH: Tensor) -> bool:
    head_dim = q_BSKH.shape[-1]
    halves = q_BSKH.dtype in (torch.bfloat16, torch.float16)
    return q_BSKH.is_cuda and halves and head_dim % 8 == 0 and head_dim <= 256


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

    # torch's default: static for training's one length, dynamic from generation's second on
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


@cached(maxsize=8)
def _starts_B(num_sequences: int, seq_len: int, device: torch.device) -> Tensor:
    """Where each of B equal sequences starts in their concatenation, and its end: `[B + 1]`."""
    return torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * seq_len


def _flash(
    q_BSKH: Tensor,
    k_BSGH: Tensor,
    v_BSGH: Tensor,
    bounds_N: Tensor,
    longest: int,
    window: int | None,
) -> Tensor:
    """FlashAttention-2 on the T = B S tokens, cut into sequences at `bounds_N`."""
    from torch.nn.attention.varlen import varlen_attn

    num_sequences, seq_len, num_heads = q_BSKH.shape[:3]
    if k_BSGH.shape[2] != num_heads:  # torch 2.11's function has no word for groups
        repeats = num_heads // k_BSGH.shape[2]
        k_BSGH, v_BSGH = (x.repeat_interleave(repeats, dim=2) for x in (k_BSGH, v_BSGH))
    y_TKH = varlen_attn(
        q_BSKH.flatten(0, 1),
        k_BSGH.flatten(0, 1),
        v_BSGH.flatten(0, 1),
        cu_seq_q=bounds_N,
        cu_seq_k=bounds_N,
        max_q=longest,
        max_k=longest,
        window_size=(-1 if window is None else window - 1, 0),
    )
    assert isinstance(y_TKH, Tensor)
    return y_TKH.unflatten(0, (num_sequences, seq_len))


def attention_reference(
    q_BSKH: Tensor,
    k_BZGH: Tensor,
    v_BZGH: Tensor,
    *,
    window: int | None = None,
    documents: Documents | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """The formula with every intermediate in memory; also the path of attention dropout."""
    num_queries, num_heads, head_dim = q_BSKH.shape[1:]
    num_keys, kv_heads = k_BZGH.shape[1:3]
    k_BKHZ = k_BZGH.repeat_interleave(num_heads // kv_heads, dim=2).permute(0, 2, 3, 1)
    v_BKZH = v_BZGH.repeat_interleave(num_heads // kv_heads, dim=2).transpose(1, 2)
    scores_BKSZ = q_BSKH.transpose(1, 2) @ k_BKHZ / math.sqrt(head_dim)
    if documents is None:
        mask = visible_mask(num_queries, num_keys, window, q_BSKH.device)
    else:
        mask = documents.visible(window)
    scores_BKSZ = scores_BKSZ.masked_fill(~mask, -math.inf)
    wide = torch.promote_types(scores_BKSZ.dtype, torch.float32)
    weights_BKSZ = torch.softmax(scores_BKSZ, dim=-1, dtype=wide).to(v_BZGH.dtype)
    if dropout is not None:
        weights_BKSZ = drop_rows(weights_BKSZ, dropout.p, dropout.key, dropout.row_ids_BKS)
    return (weights_BKSZ @ v_BKZH).transpose(1, 2)
