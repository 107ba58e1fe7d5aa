"""The logical parameters of a model and their shapes, from the configuration alone.

Checkpoints, the optimizer, Hugging Face and the planner speak of these names. They are the same for
the serial and the parallel block (which has no second norm), whatever storage fuses them.
"""

from __future__ import annotations

from megascale.config import ModelConfig

Shape = tuple[int, ...]


def _linear(name: str, out: int, in_: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (out, in_)}
    if bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes


def _norm(cfg: ModelConfig, name: str) -> dict[str, Shape]:
    parts = ("weight", "bias") if cfg.norm == "layernorm" else ("weight",)
    return {f"{name}.{part}": (cfg.hidden_size,) for part in parts}


def _layer(cfg: ModelConfig, name: str) -> dict[str, Shape]:
    hidden, head_dim, ffn = cfg.hidden_size, cfg.dim_per_head, cfg.ffn_size
    query_rows, kv_rows = cfg.num_heads * head_dim, cfg.kv_heads * head_dim
    bias = cfg.bias == "all"
    shapes = _norm(cfg, f"{name}.norm1")
    for part, rows in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
        shapes |= _linear(f"{name}.attn.{part}", rows, hidden, cfg.bias in ("all", "qkv"))
    shapes |= _linear(f"{name}.attn.o", hidden, query_rows, bias)
    if cfg.qk_norm:
        shapes |= {f"{name}.attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    if cfg.block == "serial":
        shapes |= _norm(cfg, f"{name}.norm2")
    for part in ("gate", "up") if cfg.gated else ("fc1",):
        shapes |= _linear(f"{name}.mlp.{part}", ffn, hidden, bias)
    return shapes | _linear(f"{name}.mlp.fc2", hidden, ffn, bias)


def logical_parameters(cfg: ModelConfig, num_positions: int) -> dict[str, Shape]:
    """Name to global shape (vocabulary unpadded), in the order of the forward pass."""
    shapes: dict[str, Shape] = {"embed.tokens.weight": (cfg.vocab, cfg.hidden_size)}
    if cfg.position == "learned":
        shapes["embed.positions.weight"] = (num_positions, cfg.hidden_size)
    for layer in range(cfg.num_layers):
        shapes |= _layer(cfg, f"layers.{layer}")
    shapes |= _norm(cfg, "final_norm")
    if not cfg.tie_embeddings:
        shapes["head.weight"] = (cfg.vocab, cfg.hidden_size)
    return shapes
