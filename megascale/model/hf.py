"""Hugging Face families that this model is equal to, and where each logical tensor lies in them.

Pure mapping: which family expresses a configuration (`hf_family`), the table of its tensors
(`hf_tensors`), and tensors both ways in memory (`to_hf`, `from_hf`). `hf_config` translates the
configuration. Files are the checkpoint's business.

Rotary convention: half-split on both sides, so rows of q and k are never permuted.
A family is a row in `_FAMILIES` and a function that lists the tensors of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.errors import CheckpointError, ConfigError
from megascale.model.shapes import logical_parameters

_LLAMA_LIKE: dict[str, tuple[object, ...]] = {
    "block": ("serial",),
    "norm": ("rmsnorm",),
    "activation": ("swiglu",),
    "position": ("rope",),
}
_FAMILIES: dict[str, dict[str, tuple[object, ...]]] = {
    # family: legal values of configuration keys; the first family without an objection is taken
    "llama": {
        **_LLAMA_LIKE,
        "bias": ("none", "all"),
        "qk_norm": (False,),
        "attention_window": (None,),
    },
    "mistral": {**_LLAMA_LIKE, "bias": ("none",), "qk_norm": (False,)},
    "qwen2": {**_LLAMA_LIKE, "bias": ("qkv",), "qk_norm": (False,)},
    "qwen3": {**_LLAMA_LIKE, "bias": ("none",), "qk_norm": (True,)},
    "gpt2": {
        "block": ("serial",),
        "norm": ("layernorm",),
        "activation": ("gelu_tanh", "gelu"),
        "position": ("learned",),
        "bias": ("all",),
        "qk_norm": (False,),
        "attention_window": (None,),
    },
}


def _objections(cfg: ModelConfig, family: str) -> list[str]:
    found = [
        f"model.{key} = {getattr(cfg, key)!r} (legal: {', '.join(map(repr, legal))})"
        for key, legal in _FAMILIES[family].items()
        if getattr(cfg, key) not in legal
    ]
    if family == "gpt2" and cfg.kv_heads != cfg.num_heads:
        found.append(f"model.num_kv_heads = {cfg.kv_heads} (legal: {cfg.num_heads})")
    if family == "gpt2" and cfg.dim_per_head * cfg.num_heads != cfg.hidden_size:
        found.append(f"model.head_dim = {cfg.dim_per_head} (legal: hidden_size / num_heads)")
    return found


def hf_family(cfg: ModelConfig) -> str:
    """The Hugging Face `model_type` that computes exactly this model; ConfigError if none does."""
    objections = {family: _objections(cfg, family) for family in _FAMILIES}
    nearest = min(objections, key=lambda family: len(objections[family]))
    if objections[nearest]:
        raise ConfigError(
            f"no Hugging Face family computes this model; the nearest, {nearest!r}, does not have "
            f"{'; '.join(objections[nearest])}. Train with the legal values to export, or keep the "
            "model in this project's checkpoints"
        )
    return nearest


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the Hugging Face model: logical tensors stacked along their rows.

    transposed  stored as [in, out] (GPT-2's Conv1D)
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False

    @property
    def bare_name(self) -> str:
        """The name in files of the model without its head, such as the original GPT-2's."""
        return self.name.removeprefix("model.").removeprefix("transformer.")

    def join(self, logical: Mapping[str, Tensor]) -> Tensor:
        stacked = torch.cat([logical[part] for part in self.parts])
        return stacked.t().contiguous() if self.transposed else stacked

    def split(
        self, stored: Tensor, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, Tensor]]:
        """(logical name, view) pairs; `shapes` are the logical parameters'."""
        stacked = stored.t() if self.transposed else stored
        rows = [shapes[part][0] for part in self.parts]
        expected = (sum(rows), *shapes[self.parts[0]][1:])
        if tuple(stacked.shape) != expected:
            raise CheckpointError(
                f"tensor {self.name} has shape {tuple(stored.shape)}, the configuration asks for "
                f"{expected[::-1] if self.transposed else expected}; use the config.json that "
                "belongs to these weights"
            )
        yield from zip(self.parts, torch.split(stacked, rows), strict=True)


def _llama_layer(layer: int) -> dict[str, str]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    modules = {
        f"{theirs}.input_layernorm": f"{ours}.norm1",
        f"{theirs}.post_attention_layernorm": f"{ours}.norm2",
    }
    for part in ("q", "k", "v", "o"):
        modules[f"{theirs}.self_attn.{part}_proj"] = f"{ours}.attn.{part}"
    for part in ("q_norm", "k_norm"):
        modules[f"{theirs}.self_attn.{part}"] = f"{ours}.attn.{part}"
    for theirs_part, part in (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "fc2")):
        modules[f"{theirs}.mlp.{theirs_part}"] = f"{ours}.mlp.{part}"
    return modules


def _llama_tensors(cfg: ModelConfig) -> Iterator[HfTensor]:
    modules = {"model.embed_tokens": "embed.tokens"}
    for layer in range(cfg.num_layers):
        modules |= _llama_layer(layer)
    modules |= {"model.norm": "final_norm", "lm_head": "head"}
    for theirs, ours in modules.items():
        for part in ("weight", "bias"):
            yield HfTensor(f"{theirs}.{part}", (f"{ours}.{part}",))


def _gpt2_tensors(cfg: ModelConfig) -> Iterator[HfTensor]:
    yield HfTensor("transformer.wte.weight", ("embed.tokens.weight",))
    yield HfTensor("transformer.wpe.weight", ("embed.positions.weight",))
    for layer in range(cfg.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        for part in ("weight", "bias"):
            conv1d = part == "weight"
            qkv = tuple(f"{ours}.attn.{name}.{part}" for name in "qkv")
            yield HfTensor(f"{theirs}.ln_1.{part}", (f"{ours}.norm1.{part}",))
            yield HfTensor(f"{theirs}.attn.c_attn.{part}", qkv, conv1d)
            yield HfTensor(f"{theirs}.attn.c_proj.{part}", (f"{ours}.attn.o.{part}",), conv1d)
            yield HfTensor(f"{theirs}.ln_2.{part}", (f"{ours}.norm2.{part}",))
            yield HfTensor(f"{theirs}.mlp.c_fc.{part}", (f"{ours}.mlp.fc1.{part}",), conv1d)
            yield HfTensor(f"{theirs}.mlp.c_proj.{part}", (f"{ours}.mlp.fc2.{part}",), conv1d)
    for part in ("weight", "bias"):
        yield HfTensor(f"transformer.ln_f.{part}", (f"final_norm.{part}",))
    yield HfTensor("lm_head.weight", ("head.weight",))


def hf_tensors(cfg: ModelConfig) -> list[HfTensor]:
    """Every tensor of the Hugging Face model; each logical parameter is in exactly one."""
    logical = logical_parameters(cfg, num_positions=1)
    listed = _gpt2_tensors(cfg) if hf_family(cfg) == "gpt2" else _llama_tensors(cfg)
    table = [tensor for tensor in listed if tensor.parts[0] in logical]
    covered = {part for tensor in table for part in tensor.parts}
    assert covered == set(logical), covered ^ set(logical)
    return table


def to_hf(cfg: ModelConfig, logical: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Logical tensors to the Hugging Face state dict (a tied head is left out, as they do)."""
    return {tensor.name: tensor.join(logical) for tensor in hf_tensors(cfg)}


_DERIVED = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def from_hf(
    cfg: ModelConfig, num_positions: int, stored: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A Hugging Face state dict to logical tensors (views); every weight must have its place."""
    shapes = logical_parameters(cfg, num_positions)
    logical: dict[str, Tensor] = {}
    left = {name for name in stored if not _DERIVED.search(name)}
    if cfg.tie_embeddings:
        left.discard("lm_head.weight")
    missing = []
    for tensor in hf_tensors(cfg):
        name = tensor.name if tensor.name in stored else tensor.bare_name
        if name not in stored:
            missing.append(tensor.name)
            continue
        left.discard(name)
        logical.update(tensor.split(stored[name], shapes))
    if missing or left:
        raise CheckpointError(
            "the Hugging Face weights do not fit the configuration: "
            f"{_some('missing', missing)}; {_some('without a place', sorted(left))}; "
            "use the config.json that belongs to these weights"
        )
    return logical


def _some(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} {what}" + (f" ({shown})" if names else "")
