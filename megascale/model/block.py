"""The two transformer blocks of MegaScale 3.1.

Serial:   x = x + Attn(LN1(x)); x = x + MLP(LN2(x))
Parallel: x = x + Attn(LN(x)) + MLP(LN(x))

In the parallel block one norm feeds both branches, the four projections in are one GEMM and the two
out are accumulated into one tensor: tensor parallelism then gathers once and reduces once a layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.model.attention import Attention, SelfAttention, qkv_blocks
from megascale.model.cache import KeyValueCache
from megascale.model.context import ForwardContext
from megascale.model.layers import FusedLinear, Norm, RowPair
from megascale.model.recompute import remade
from megascale.ops.activation import activation
from megascale.ops.column_split import Part
from megascale.ops.random import dropout, stream_key


def hidden_dropout(x_tD: Tensor, p: float, ctx: ForwardContext, site: str) -> Tensor:
    """Dropout of a hidden state; the mask depends on seed, site, global token and column."""
    if ctx.dropout_seed is None or p == 0.0:
        return x_tD
    assert ctx.token_ids_t is not None, "hidden dropout needs ctx.token_ids_t"
    key = stream_key(ctx.dropout_seed, site)
    return dropout(x_tD, p, key, ctx.token_ids_t, mode=ctx.operators)


def fc1_blocks(cfg: ModelConfig, layer: int) -> tuple[tuple[str, int], ...]:
    """The logical layers into the MLP, in order."""
    names = ("gate", "up") if cfg.gated else ("fc1",)
    return tuple((f"layers.{layer}.mlp.{name}", cfg.ffn_size) for name in names)


def activate(
    name: str, h_Tf: Tensor, bias_f: Tensor | None, ctx: ForwardContext, part: Part | None = None
) -> tuple[Tensor, AbstractContextManager[None]]:
    """The activated tensor, and the context in which its consumer saves what it needs of it."""
    a_Tf = activation(name, h_Tf, bias_f, ctx.operators, part)
    if ctx.recompute != "selective":
        return a_Tf, nullcontext()
    kept_Tf = h_Tf.detach()
    return a_Tf, remade(a_Tf, lambda: activation(name, kept_Tf, bias_f, ctx.operators))


class Mlp(nn.Module):
    """The serial block's MLP: fc1 (or gate and up), activation, fc2."""

    def __init__(
        self, cfg: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.activation = cfg.activation
        bias = cfg.bias == "all"
        self.fc1 = FusedLinear(cfg.hidden_size, fc1_blocks(cfg, layer), bias, device, dtype)
        out_blocks = ((f"layers.{layer}.mlp.fc2", cfg.hidden_size),)
        self.fc2 = FusedLinear(cfg.ffn_size, out_blocks, bias, device, dtype)

    def forward(self, x_TD: Tensor, ctx: ForwardContext) -> Tensor:
        if ctx.operators == "plain":
            a_Tf, saving = activate(self.activation, self.fc1(x_TD), None, ctx)
        else:
            a_Tf, saving = activate(self.activation, self.fc1.product(x_TD), self.fc1.bias, ctx)
        with saving:
            y: Tensor = self.fc2(a_Tf)
        return y


class Block(nn.Module, ABC):
    """A layer: hidden states to hidden states, the sum at its end left open."""

    @abstractmethod
    def forward(
        self,
        x_tD: Tensor,
        ctx: ForwardContext,
        cache: KeyValueCache | None = None,
        branch_tD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer on x + branch, as (stream, branch) whose sum is the result: the next layer's
        first norm adds them in the pass that it makes anyway (`ops/norm`)."""


class SerialBlock(Block):
    """Attention, then MLP, each behind its own norm."""

    def __init__(
        self, cfg: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name, self.dropout = f"layers.{layer}", cfg.hidden_dropout
        norm = (cfg.norm, cfg.hidden_size, cfg.norm_eps, device, dtype)
        self.norm1 = Norm(f"{self.name}.norm1", *norm)
        self.attn = SelfAttention(cfg, layer, device, dtype)
        self.norm2 = Norm(f"{self.name}.norm2", *norm)
        self.mlp = Mlp(cfg, layer, device, dtype)

    def forward(
        self,
        x_tD: Tensor,
        ctx: ForwardContext,
        cache: KeyValueCache | None = None,
        branch_tD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_tD, normed_tD = self.norm1(x_tD, branch_tD, ctx.operators)
        y_tD = self.attn(normed_tD, ctx, cache)
        y_tD = hidden_dropout(y_tD, self.dropout, ctx, f"{self.name}.attn.dropout")
        x_tD, normed_tD = self.norm2(x_tD, y_tD, ctx.operators)
        y_tD = self.mlp(normed_tD, ctx)
        return x_tD, hidden_dropout(y_tD, self.dropout, ctx, f"{self.name}.mlp.dropout")


class ParallelBlock(Block):
    """Attention and MLP side by side on one norm, between one GEMM in and one pair out.

    The bias of the GEMM in stays there: half of it belongs to q, k and v, and where positions are
    learned there is no pass over those that could add it.
    """

    def __init__(
        self, cfg: ModelConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.name, self.dropout = f"layers.{layer}", cfg.hidden_dropout
        self.activation = cfg.activation
        hidden, inner = cfg.hidden_size, cfg.num_heads * cfg.dim_per_head
        bias = cfg.bias == "all"
        self.norm1 = Norm(f"{self.name}.norm1", cfg.norm, hidden, cfg.norm_eps, device, dtype)
        blocks = qkv_blocks(cfg, layer) + fc1_blocks(cfg, layer)
        self.in_proj = FusedLinear(hidden, blocks, bias, device, dtype)
        self.attn = Attention(cfg, layer, device, dtype)
        attn_out, mlp_out = f"{self.name}.attn.o", f"{self.name}.mlp.fc2"
        self.out_proj = RowPair(attn_out, inner, mlp_out, cfg.ffn_size, hidden, bias, device, dtype)

    def forward(
        self,
        x_tD: Tensor,
        ctx: ForwardContext,
        cache: KeyValueCache | None = None,
        branch_tD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_tD, normed_tD = self.norm1(x_tD, branch_tD, ctx.operators)
        joined_Tn = self.in_proj(normed_tD)
        sizes = (3, len(self.in_proj.blocks) - 3)
        (qkv_Tn, h_Tf), (qkv_part, h_part) = self.in_proj.split(joined_Tn, sizes)
        attended_Tk = self.attn.core(qkv_Tn, ctx, cache, qkv_part)
        a_Tf, saving = activate(self.activation, h_Tf, None, ctx, h_part)
        with saving:
            y_tD = self.out_proj(attended_Tk, a_Tf)
        return x_tD, hidden_dropout(y_tD, self.dropout, ctx, f"{self.name}.dropout")


BLOCKS: dict[str, type[SerialBlock] | type[ParallelBlock]] = {
    "serial": SerialBlock,
    "parallel": ParallelBlock,
}
