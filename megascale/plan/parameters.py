"""Logical parameters of a model, from its configuration alone: names, shapes, placement. No torch.

The names are the ones that checkpoints, optimizer and Hugging Face mapping use; the model package
builds the same set (its tests hold it to this table). Weights are [out, in].

Invariant: every logical parameter of the model appears in exactly one chunk, but for tied
embeddings, of which a last stage that is not the first holds a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from megascale.config import ModelConfig
from megascale.shards import Placement


@dataclass(frozen=True)
class LogicalParameter:
    """One matrix or vector of the model, whole. A ROW linear's bias is REPLICATED by itself.

    num_stages  pipeline stages that share its vocabulary's rows (a shared head)
    """

    name: str
    shape: tuple[int, ...]
    placement: Placement
    num_stages: int = 1

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def local_elements(self, tp: int) -> int:
        """Elements that each of `tp` ranks stores; the vocabulary is padded to a multiple of tp."""
        match self.placement:
            case Placement.REPLICATED:
                return self.num_elements
            case Placement.VOCAB:
                rows, hidden = self.shape
                return -(-rows // (tp * self.num_stages)) * hidden
            case _:
                assert self.num_elements % tp == 0, (self, tp)
                return self.num_elements // tp

    @property
    def component(self) -> str:
        """ "embedding", "attention", "mlp", "norm" or "head"."""
        parts = self.name.split(".")
        if any("norm" in part for part in parts):
            return "norm"
        return {"embed": "embedding", "attn": "attention", "mlp": "mlp", "head": "head"}[
            parts[0] if parts[0] != "layers" else parts[2]
        ]


def layer_parameters(model: ModelConfig, layer: int) -> list[LogicalParameter]:
    """Of one transformer layer. The parallel block has one norm for both branches."""
    prefix = f"layers.{layer}"
    hidden, head = model.hidden_size, model.dim_per_head
    query, key = model.num_heads * head, model.kv_heads * head
    column, row = Placement.COLUMN, Placement.ROW
    found = list(_norm(model, f"{prefix}.norm1"))
    for name, rows in (("q", query), ("k", key), ("v", key)):
        has_bias = model.bias in ("all", "qkv")
        found += _linear(f"{prefix}.attn.{name}", rows, hidden, column, has_bias)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            weight = f"{prefix}.attn.{name}.weight"
            found.append(LogicalParameter(weight, (head,), Placement.REPLICATED))
    found += _linear(f"{prefix}.attn.o", hidden, query, row, model.bias == "all")
    if model.block == "serial":
        found += _norm(model, f"{prefix}.norm2")
    for name in ("gate", "up") if model.gated else ("fc1",):
        found += _linear(
            f"{prefix}.mlp.{name}", model.ffn_size, hidden, column, model.bias == "all"
        )
    found += _linear(f"{prefix}.mlp.fc2", hidden, model.ffn_size, row, model.bias == "all")
    return found


def chunk_parameters(
    model: ModelConfig, layers: range, *, embed: bool, head: bool, num_positions: int
) -> list[LogicalParameter]:
    """Of a chunk that holds `layers`, the embedding if `embed`, final norm and head if `head`."""
    hidden = model.hidden_size
    found: list[LogicalParameter] = []
    tokens = LogicalParameter("embed.tokens.weight", (model.vocab, hidden), Placement.VOCAB)
    if embed:
        found.append(tokens)
        if model.position == "learned":
            shape = (num_positions, hidden)
            found.append(LogicalParameter("embed.positions.weight", shape, Placement.REPLICATED))
    for layer in layers:
        found += layer_parameters(model, layer)
    if head:
        found += _norm(model, "final_norm")
        if not model.tie_embeddings:
            found.append(LogicalParameter("head.weight", (model.vocab, hidden), Placement.VOCAB))
        elif not embed:
            found.append(tokens)
    return found


def model_parameters(model: ModelConfig, num_positions: int) -> list[LogicalParameter]:
    """All logical parameters, each once."""
    layers = range(model.num_layers)
    return chunk_parameters(model, layers, embed=True, head=True, num_positions=num_positions)


def count_by_component(parameters: Iterable[LogicalParameter]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[parameter.component] += parameter.num_elements
    return dict(counts)


def _linear(
    name: str, rows: int, columns: int, placement: Placement, bias: bool
) -> Iterator[LogicalParameter]:
    yield LogicalParameter(f"{name}.weight", (rows, columns), placement)
    if bias:
        bias_placement = Placement.REPLICATED if placement is Placement.ROW else placement
        yield LogicalParameter(f"{name}.bias", (rows,), bias_placement)


def _norm(model: ModelConfig, name: str) -> Iterator[LogicalParameter]:
    yield LogicalParameter(f"{name}.weight", (model.hidden_size,), Placement.REPLICATED)
    if model.norm == "layernorm":
        yield LogicalParameter(f"{name}.bias", (model.hidden_size,), Placement.REPLICATED)
