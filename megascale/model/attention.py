"""From the fused projection to the attention output: split heads, QK-norm, rotary, attention.

The projections around it belong to the block: the serial block has its own (`SelfAttention`), the
parallel block fuses them with the MLP's. Head counts come from the width of the fused tensor: the
configuration says only how many query heads share a key-value head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.model.cache import KeyValueCache
from megascale.model.context import ForwardContext
from megascale.model.layers import FusedLinear, Norm
from megascale.model.recompute import checkpointed
from megascale.ops.attention import AttentionDropout, attention
from megascale.ops.column_split import Part
from megascale.ops.compiled import compiled_on_cuda
from megascale.ops.heads import Table, heads, split_heads
from megascale.ops.random import stream_key
from megascale.ops.rope import rope_table, rotate


@compiled_on_cuda
def _normed_heads(
    qkv_Tn: Tensor,
    norm_weights: tuple[Tensor, Tensor],
    eps: float,
    rope: Table | None,
    seq_len: int,
    head_dim: int,
    queries_per_kv: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`heads_reference` with QK-norm before the rotation, as one chain."""
    q, k, v = split_heads(qkv_Tn, seq_len, head_dim, queries_per_kv)
    q = F.rms_norm(q, (head_dim,), norm_weights[0], eps)
    k = F.rms_norm(k, (head_dim,), norm_weights[1], eps)
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    return q, k, v.contiguous()


class Attention(nn.Module):
    """Attention without its projections; `head_offset` is the global number of query head 0."""

    def __init__(
        self, cfg: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.cfg, self.layer = cfg, layer
        self.head_offset = 0
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if cfg.qk_norm:
            name = f"layers.{layer}.attn"
            size, eps = cfg.dim_per_head, cfg.norm_eps
            self.q_norm = Norm(f"{name}.q_norm", "rmsnorm", size, eps, device, dtype)
            self.k_norm = Norm(f"{name}.k_norm", "rmsnorm", size, eps, device, dtype)

    def core(
        self,
        qkv_Tn: Tensor,
        ctx: ForwardContext,
        cache: KeyValueCache | None,
        part: Part | None = None,
    ) -> Tensor:
        """Fused projection `[T, n]`, or that `part` of a wider one, to the attended values
        `[T, k]`."""
        dropout = self._dropout(qkv_Tn, ctx)
        if dropout is not None and ctx.recompute == "selective":
            return checkpointed(self._attend, qkv_Tn, ctx, cache, dropout, part)
        return self._attend(qkv_Tn, ctx, cache, dropout, part)

    def _attend(
        self,
        qkv_Tn: Tensor,
        ctx: ForwardContext,
        cache: KeyValueCache | None,
        dropout: AttentionDropout | None,
        part: Part | None,
    ) -> Tensor:
        q, k, v = self._heads(qkv_Tn, ctx, 0 if cache is None else cache.length, part)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y_BSKH = attention(
            q,
            k,
            v,
            window=self.cfg.attention_window,
            documents=ctx.documents,
            dropout=dropout,
            mode=ctx.operators,
        )
        return y_BSKH.reshape(qkv_Tn.shape[0], -1)

    def _heads(
        self, qkv_Tn: Tensor, ctx: ForwardContext, start: int, part: Part | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        cfg, seq_len = self.cfg, ctx.seq_len
        head_dim, queries_per_kv = cfg.dim_per_head, cfg.num_heads // cfg.kv_heads
        shape = (seq_len, head_dim, queries_per_kv)
        rope = None
        if cfg.position == "rope":
            dtype, device = qkv_Tn.dtype, qkv_Tn.device
            stop = start + seq_len
            table = rope_table(stop, head_dim, cfg.rope_theta, cfg.rope_scaling, dtype, device)
            rope = (table[0][start:], table[1][start:])
        if self.q_norm is None or self.k_norm is None:
            return heads(qkv_Tn, *shape, rope, ctx.operators, part)
        weights = (self.q_norm.weight, self.k_norm.weight)
        return _normed_heads(ctx.operators, qkv_Tn, weights, cfg.norm_eps, rope, *shape)

    def _dropout(self, qkv_Tn: Tensor, ctx: ForwardContext) -> AttentionDropout | None:
        """A probability's row is (global token number, global head)."""
        cfg = self.cfg
        if ctx.dropout_seed is None or cfg.attention_dropout == 0.0:
            return None
        assert ctx.sample_numbers_B is not None, "attention dropout needs ctx.sample_numbers_B"
        device = qkv_Tn.device
        queries_per_kv = cfg.num_heads // cfg.kv_heads
        total_heads = qkv_Tn.shape[-1] // cfg.dim_per_head
        num_heads = total_heads * queries_per_kv // (queries_per_kv + 2)
        heads_K = torch.arange(num_heads, device=device) + self.head_offset
        positions_S = torch.arange(ctx.seq_len, device=device)
        tokens_BS = ctx.sample_numbers_B[:, None] * ctx.seq_len + positions_S
        row_ids_BKS = tokens_BS[:, None, :] * cfg.num_heads + heads_K[:, None]
        key = stream_key(ctx.dropout_seed, f"layers.{self.layer}.attn.weights_dropout")
        return AttentionDropout(cfg.attention_dropout, key, row_ids_BKS)


def qkv_blocks(cfg: ModelConfig, layer: int) -> tuple[tuple[str, int], ...]:
    """The logical layers of the fused projection, in order."""
    query_rows, kv_rows = cfg.num_heads * cfg.dim_per_head, cfg.kv_heads * cfg.dim_per_head
    name = f"layers.{layer}.attn"
    return ((f"{name}.q", query_rows), (f"{name}.k", kv_rows), (f"{name}.v", kv_rows))


class SelfAttention(Attention):
    """The serial block's attention: qkv, core, o."""

    def __init__(
        self, cfg: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(cfg, layer, device, dtype)
        hidden, inner = cfg.hidden_size, cfg.num_heads * cfg.dim_per_head
        blocks = qkv_blocks(cfg, layer)
        self.qkv = FusedLinear(hidden, blocks, cfg.bias in ("all", "qkv"), device, dtype)
        out_blocks = ((f"layers.{layer}.attn.o", hidden),)
        self.o = FusedLinear(inner, out_blocks, cfg.bias == "all", device, dtype)

    def forward(self, x_TD: Tensor, ctx: ForwardContext, cache: KeyValueCache | None) -> Tensor:
        y: Tensor = self.o(self.core(self.qkv(x_TD), ctx, cache))
        return y
