"""`config.json` of Hugging Face from our configuration, and ours from theirs. Pure functions.

Written so that transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) read it.
What our family cannot compute is refused by name: a silent approximation would be another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.model.hf import hf_family

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # llama: as the query heads


def hf_config(
    cfg: ModelConfig,
    *,
    num_positions: int,
    dtype: str = "float32",
    eos_token_id: int | None = None,
) -> dict[str, Any]:
    """The content of config.json; ConfigError where no family computes this model.

    num_positions  longest sequence: rows of learned positions, else what it was trained on
    """
    family = hf_family(cfg)
    common = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": cfg.vocab,
        "tie_word_embeddings": cfg.tie_embeddings,
        "initializer_range": cfg.init_std,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
    }
    if family == "gpt2":
        return common | _gpt2_config(cfg, num_positions)
    return common | _llama_config(cfg, family, num_positions)


def _gpt2_config(cfg: ModelConfig, num_positions: int) -> dict[str, Any]:
    return {
        "n_embd": cfg.hidden_size,
        "n_layer": cfg.num_layers,
        "n_head": cfg.num_heads,
        "n_inner": cfg.ffn_size,
        "n_positions": num_positions,
        "activation_function": "gelu" if cfg.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": cfg.norm_eps,
        "embd_pdrop": cfg.hidden_dropout,
        "resid_pdrop": cfg.hidden_dropout,
        "attn_pdrop": cfg.attention_dropout,
    }


def _llama_config(cfg: ModelConfig, family: str, num_positions: int) -> dict[str, Any]:
    scaling = cfg.rope_scaling and {
        "rope_type": "llama3",
        "factor": cfg.rope_scaling.factor,
        "low_freq_factor": cfg.rope_scaling.low_freq_factor,
        "high_freq_factor": cfg.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": cfg.rope_scaling.original_max_seq_len,
    }
    config: dict[str, Any] = {
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.ffn_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.dim_per_head,
        "hidden_act": "silu",
        "max_position_embeddings": num_positions,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": cfg.rope_theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": cfg.bias == "all",
        "attention_dropout": cfg.attention_dropout,
    }
    if family == "llama":
        config["mlp_bias"] = cfg.bias == "all"
    if family != "llama":
        config["sliding_window"] = cfg.attention_window
    if family in ("qwen2", "qwen3"):
        windowed = cfg.attention_window is not None
        kind = "sliding_attention" if windowed else "full_attention"
        config["use_sliding_window"] = windowed
        config["max_window_layers"] = 0 if windowed else cfg.num_layers
        config["layer_types"] = [kind] * cfg.num_layers
    return config


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Our configuration of a Hugging Face `config.json`; ConfigError for what we cannot compute."""
    family = config.get("model_type")
    if family not in _ARCHITECTURES:
        raise ConfigError(
            f"config.json has model_type {family!r}; legal: {', '.join(_ARCHITECTURES)}"
        )
    values = _from_gpt2(config) if family == "gpt2" else _from_llama(config, str(family))
    return ModelConfig(**{key: value for key, value in values.items() if value is not None})


def _need(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(f"config.json has no {key!r}; take the config.json of the weights")
    return config[key]


def _refuse_unless(config: Mapping[str, Any], key: str, *legal: object) -> None:
    """A key that is absent has a legal default."""
    if key in config and config[key] not in legal:
        raise ConfigError(
            f"config.json has {key} = {config[key]!r}, which this model cannot compute; "
            f"legal: {', '.join(map(repr, legal))}"
        )


def _from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_unless(config, "activation_function", *_GPT2_ACTIVATIONS)
    _refuse_unless(config, "scale_attn_weights", True)
    _refuse_unless(config, "scale_attn_by_inverse_layer_idx", False)
    _refuse_unless(config, "add_cross_attention", False)
    _refuse_unless(config, "embd_pdrop", config.get("resid_pdrop", 0.1))
    hidden = _need(config, "n_embd")
    return {
        "hidden_size": hidden,
        "num_layers": _need(config, "n_layer"),
        "num_heads": _need(config, "n_head"),
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "vocab_size": _need(config, "vocab_size"),
        "max_seq_len": _need(config, "n_positions"),
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _GPT2_ACTIVATIONS[config.get("activation_function", "gelu_new")],
        "position": "learned",
        "bias": "all",
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "hidden_dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        "init_std": config.get("initializer_range"),
    }


def _from_llama(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    _refuse_unless(config, "hidden_act", "silu")
    bias = "qkv" if family == "qwen2" else "none"
    if family == "llama" and config.get("attention_bias"):
        _refuse_unless({"mlp_bias": False, **config}, "mlp_bias", True)
        bias = "all"
    else:
        _refuse_unless(config, "attention_bias", *((True, False) if bias == "qkv" else (False,)))
        _refuse_unless(config, "mlp_bias", False)
    theta, scaling = _rope(config)
    num_heads = _need(config, "num_attention_heads")
    return {
        "hidden_size": _need(config, "hidden_size"),
        "num_layers": _need(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads")
        or _DEFAULT_KV_HEADS.get(family, num_heads),
        "head_dim": config.get("head_dim") or (128 if family == "qwen3" else None),
        "ffn_hidden_size": _need(config, "intermediate_size"),
        "vocab_size": _need(config, "vocab_size"),
        "max_seq_len": config.get("max_position_embeddings"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "bias": bias,
        "qk_norm": family == "qwen3",
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "attention_dropout": config.get("attention_dropout"),
        "attention_window": _window(config, family),
        "init_std": config.get("initializer_range"),
    }


def _rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Theta and Llama 3.1's scaling, from either generation of keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ConfigError(
            f"config.json scales rotary positions by {kind!r}; legal: 'default', 'llama3'"
        )
    return theta, {
        "factor": rope["factor"],
        "low_freq_factor": rope["low_freq_factor"],
        "high_freq_factor": rope["high_freq_factor"],
        "original_max_seq_len": rope["original_max_position_embeddings"],
    }


def _window(config: Mapping[str, Any], family: str) -> int | None:
    """The sliding window, if it is the same in all layers."""
    if family == "llama":
        return None
    if family == "mistral":
        return config.get("sliding_window", 4096)
    num_layers = _need(config, "num_hidden_layers")
    if not config.get("use_sliding_window", False):
        return None
    first = config.get("max_window_layers", 28)
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(set(kinds)) > 1:
        raise ConfigError(
            "config.json mixes full and sliding-window layers; legal: one kind in all layers"
        )
    return config.get("sliding_window", 4096) if kinds[0] == "sliding_attention" else None
