"""Named model shapes: GPT-3, the paper's 175B and 530B (MegaScale Table 1), Llama, Mistral, Qwen,
and tiny ones for tests and the first run. A preset is a row here and nothing else.
"""

from __future__ import annotations

import difflib
from typing import Any

_GPT: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "bias": "all",
    "tie_embeddings": True,
    "max_seq_len": 2048,
    "vocab_size": 50257,
}
_LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "bias": "none",
    "tie_embeddings": False,
}


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    shape = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads}
    return {**_GPT, **shape, **more}


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any
) -> dict[str, Any]:
    shape = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
    }
    return {**_LLAMA, **shape, **more}


_LLAMA31_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_seq_len": 8192,
    },
}
_PAPER = {"vocab_size": 64000, "tie_embeddings": False}

PRESETS: dict[str, dict[str, Any]] = {
    # tiny: for tests and `make train`
    "tiny-gpt": _gpt(4, 64, 4, vocab_size=512, max_seq_len=256),
    "tiny-llama": _llama(4, 64, 4, 2, 160, 512),
    "tiny-mistral": _llama(4, 64, 4, 2, 160, 512, attention_window=16),
    "tiny-qwen2": _llama(4, 64, 4, 2, 160, 512, bias="qkv", norm_eps=1e-6, tie_embeddings=True),
    "tiny-qwen3": _llama(4, 64, 4, 2, 160, 512, qk_norm=True, head_dim=32, norm_eps=1e-6),
    # GPT-3 family (Brown et al., Table 2.1)
    "gpt3-125m": _gpt(12, 768, 12),
    "gpt3-350m": _gpt(24, 1024, 16),
    "gpt3-760m": _gpt(24, 1536, 16),
    "gpt3-1.3b": _gpt(24, 2048, 16),
    "gpt3-2.7b": _gpt(32, 2560, 32),
    "gpt3-6.7b": _gpt(32, 4096, 32),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-175b": _gpt(96, 12288, 96),
    # the paper's models (MegaScale Table 1; virtual stages 6 and 3)
    "megascale-175b": _gpt(96, 12288, 128, **_PAPER),
    "megascale-530b": _gpt(105, 20480, 160, **_PAPER),
    # the shapes that the GPU tables use
    "bench-7b": _gpt(32, 4096, 32, **_PAPER),
    "bench-175b-4l": _gpt(4, 12288, 96, **_PAPER),
    "bench-175b-8l": _gpt(8, 12288, 96, **_PAPER),
    # Llama
    "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, rope_theta=500000.0),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, rope_theta=500000.0),
    "llama3.1-8b": _llama(32, 4096, 32, 8, 14336, 128256, **_LLAMA31_ROPE),
    "llama3.1-70b": _llama(80, 8192, 64, 8, 28672, 128256, **_LLAMA31_ROPE),
    "llama3.1-405b": _llama(126, 16384, 128, 8, 53248, 128256, **_LLAMA31_ROPE),
    # Mistral, Qwen
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, attention_window=4096),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, bias="qkv", rope_theta=1e6, norm_eps=1e-6),
    "qwen3-8b": _llama(
        36, 4096, 32, 8, 12288, 151936, qk_norm=True, head_dim=128, rope_theta=1e6, norm_eps=1e-6
    ),
}


def nearest_preset(name: object) -> str:
    """A hint for an unknown preset: the nearest name, else all names."""
    near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"legal presets: {', '.join(PRESETS)}"
