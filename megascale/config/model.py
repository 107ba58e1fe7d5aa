"""`[model]`: the shape of a transformer. One family by configuration, from GPT-3 to Llama 3 and
Qwen 3, with MegaScale's parallel block and sliding window (MegaScale 3.1) as switches.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megascale.config.base import Section
from megascale.config.presets import PRESETS, nearest_preset


class RopeScaling(Section):
    """Llama 3.1's frequency scaling: long wavelengths are stretched by `factor`."""

    factor: float = Field(8.0, ge=1.0)
    low_freq_factor: float = Field(1.0, gt=0.0)
    high_freq_factor: float = Field(4.0, gt=0.0)
    original_max_seq_len: int = Field(8192, ge=1)


class ModelConfig(Section):
    """Shape and algorithm of the model. `preset` fills every key that is not given."""

    preset: str | None = None
    hidden_size: int = Field(256, ge=1)
    num_layers: int = Field(4, ge=1)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int | None = Field(None, ge=1, description="None: as num_heads")
    head_dim: int | None = Field(None, ge=1, description="None: hidden_size / num_heads")
    ffn_hidden_size: int | None = Field(None, ge=1, description="None: 4 x hidden_size")
    vocab_size: int | None = Field(None, ge=2, description="None: taken from the tokenizer")
    max_seq_len: int | None = Field(
        None, ge=1, description="rows of learned positions; None: training.seq_len"
    )
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: float = Field(1e-5, gt=0.0)
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "swiglu"
    position: Literal["learned", "rope"] = "rope"
    rope_theta: float = Field(10000.0, gt=0.0)
    rope_scaling: RopeScaling | None = None
    bias: Literal["all", "qkv", "none"] = "none"
    qk_norm: bool = False
    hidden_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    attention_dropout: float = Field(0.0, ge=0.0, lt=1.0)
    tie_embeddings: bool = False
    block: Literal["serial", "parallel"] = "serial"
    attention_window: int | None = Field(
        None, ge=1, description="tokens a query sees, itself included; None: all before it"
    )
    init_std: float = Field(0.02, gt=0.0)
    scaled_residual_init: bool = Field(
        True, description="divide the std of o and fc2 by sqrt(2 x num_layers)"
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("preset"), str):
            name = values["preset"]
            if name not in PRESETS:
                raise ValueError(f"model.preset is {name!r}; {nearest_preset(name)}")
            return {**PRESETS[name], **values}
        return values

    @model_validator(mode="after")
    def _shapes_divide(self) -> ModelConfig:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size {self.hidden_size} is not a multiple of model.num_heads "
                f"{self.num_heads}; change one of them or give model.head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_heads {self.num_heads} is not a multiple of model.num_kv_heads "
                f"{self.kv_heads}; each key-value head serves an equal number of query heads"
            )
        if self.block == "parallel" and self.bias == "qkv":
            raise ValueError(
                "model.bias is 'qkv' with model.block 'parallel', whose q, k, v and fc1 are one "
                "matrix; legal there: 'all' or 'none'"
            )
        if self.position == "rope" and self.dim_per_head % 2:
            raise ValueError(
                f"rotary positions need an even head dimension, got {self.dim_per_head}; "
                "change model.head_dim or use model.position = 'learned'"
            )
        return self

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def dim_per_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def vocab(self) -> int:
        """The vocabulary size; it must have been given or resolved from the tokenizer."""
        assert self.vocab_size is not None, "vocab_size is resolved before a model is built"
        return self.vocab_size
