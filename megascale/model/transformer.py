"""A contiguous run of transformer layers: the whole model, or one pipeline stage's chunk of it.

The chunk is made of *units* ("embed", "layers.N", "head"), the grain at which the sharded data
parallel gathers parameters and reduces gradients. Before each unit the forward pass calls
`before_unit(name, x)`; `parallel` replaces it by an identity that waits for the unit's parameters
and, in backward, starts the reduce-scatter of what lies behind it.

Module paths and logical names carry the global layer number, so a chunk's parameters have the same
names in every pipeline layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.model.block import BLOCKS, hidden_dropout
from megascale.model.cache import KeyValueCache
from megascale.model.context import ForwardContext
from megascale.model.layers import FusedLinear, Norm, VocabEmbedding
from megascale.model.recompute import checkpointed


class Embedding(nn.Module):
    """Token rows, plus learned position rows, then dropout."""

    def __init__(
        self, cfg: ModelConfig, num_positions: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden = cfg.hidden_size
        self.dropout = cfg.hidden_dropout
        self.tokens = VocabEmbedding("embed.tokens", cfg.vocab, hidden, device, dtype)
        self.positions: VocabEmbedding | None = None
        if cfg.position == "learned":
            self.positions = VocabEmbedding("embed.positions", num_positions, hidden, device, dtype)

    def forward(self, tokens_T: Tensor, ctx: ForwardContext) -> Tensor:
        x_tD: Tensor = self.tokens(tokens_T)
        if self.positions is not None:
            x_tD = x_tD + self.positions(ctx.positions_t)
        return hidden_dropout(x_tD, self.dropout, ctx, "embed.dropout")


def _summed(
    layer: nn.Module, x_tD: Tensor, ctx: ForwardContext, cache: KeyValueCache | None
) -> Tensor:
    x_tD, branch_tD = layer(x_tD, ctx, cache)
    return x_tD + branch_tD


class TransformerChunk(nn.Module):
    """Layers `layers` of the model, with the embedding and the head where asked.

    norm           the final norm without the head, which is an `OutputHead` elsewhere
    num_positions  rows of learned positions (`model.max_seq_len`, else the sequence length)
    forward(x, ctx, cache)  x is tokens_T (int64) with `embed`, else hidden states x_tD; returns
                            hidden states, or logits_TV in the model's dtype with `head`
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layers: Iterable[int],
        *,
        embed: bool,
        head: bool,
        norm: bool = False,
        num_positions: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.num_positions = num_positions if cfg.position == "learned" else None
        self.embed = Embedding(cfg, num_positions, device, dtype) if embed else None
        block = BLOCKS[cfg.block]
        self.layers = nn.ModuleDict({str(n): block(cfg, n, device, dtype) for n in layers})
        self.final_norm: Norm | None = None
        self.head: FusedLinear | None = None
        self.before_unit: Callable[[str, Tensor], Tensor] = lambda _name, x: x
        hidden = cfg.hidden_size
        if head or norm:
            self.final_norm = Norm("final_norm", cfg.norm, hidden, cfg.norm_eps, device, dtype)
        if head:
            shared = cfg.tie_embeddings and self.embed is not None
            blocks = (("embed.tokens" if cfg.tie_embeddings else "head", cfg.vocab),)
            head_device = torch.device("meta") if shared else device
            self.head = FusedLinear(hidden, blocks, False, head_device, dtype)
            if shared and self.embed is not None:
                self.head.weight = self.embed.tokens.weight

    def forward(self, x: Tensor, ctx: ForwardContext, cache: KeyValueCache | None = None) -> Tensor:
        self._check_positions(ctx.seq_len + (0 if cache is None else cache.length))
        if self.embed is not None:
            x = self.embed(self.before_unit("embed", x), ctx)
        full_recompute = ctx.recompute == "full" and torch.is_grad_enabled()
        branch: Tensor | None = None  # what the stream x lacks: the next norm adds it
        for number, layer in self.layers.items():
            x = self.before_unit(f"layers.{number}", x)
            if full_recompute:  # keeps one tensor a layer, so the layer ends with its sum
                x = checkpointed(_summed, layer, x, ctx, cache)
            else:
                x, branch = layer(x, ctx, cache, branch)
        if self.final_norm is not None:
            _, x = self.final_norm(self.before_unit("head", x), branch, ctx.operators)
            x = x if self.head is None else self.head(x)
        elif branch is not None:
            x = x + branch
        if cache is not None:
            cache.advance(ctx.seq_len)
        return x

    def units(self) -> list[tuple[str, list[str]]]:
        """(unit name, module paths) in forward order; every parameter is in exactly one unit.

        A tied head in the same chunk shares the embedding's parameter, which belongs to "embed".
        """
        units = [("embed", ["embed"])] if self.embed is not None else []
        units += [(f"layers.{number}", [f"layers.{number}"]) for number in self.layers]
        if self.final_norm is not None:
            units.append(("head", ["final_norm", "head"]))
        return units

    def _check_positions(self, num_positions: int) -> None:
        if self.num_positions is not None and num_positions > self.num_positions:
            raise ConfigError(
                f"{num_positions} positions asked of a model with {self.num_positions} learned "
                "positions; shorten the sequence or raise model.max_seq_len before training"
            )
