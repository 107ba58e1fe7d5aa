"""Bytes, FLOPs and model FLOPs utilisation (MegaScale 6.1, Korthikanti et al. 2205.05198).

MFU is `FLOPs a token x tokens a second / (devices x peak)`. Two conventions are always named:
`mfu` counts causal attention in full, as MegaScale, PaLM and TorchTitan do; `mfu_causal` counts
half of it (s/2 keys a query), as Megatron-LM has done since March 2025. Recomputation and the
lookup of the input embedding are never counted. Where a sliding window is set, both multiply the
attention term by the share of causal pairs that the window keeps. A document mask is not known
here: the attention of whole samples is counted, so with short documents both are too high by up to
the attention term.

For a GPT the full convention equals 72 L h^2 (1 + s/6h + V/12Lh). An unknown device has no peak,
and therefore no MFU: a guessed peak is the usual reason for published figures above 100 %.
"""

from __future__ import annotations

import re
from typing import Literal

from megascale.config.model import ModelConfig

Causal = Literal["full", "half"]

# Dense bf16 peak of a device in TFLOP/s, without sparsity, from the vendors' data sheets.
# The first row whose pattern is found in the device's name counts.
_PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"\bB200\b", 2250.0, "B200"),
    (r"\bH200 NVL\b", 835.0, "H200 NVL"),
    (r"\bG?H200\b", 989.0, "H200"),
    (r"\bH[18]00\b.*\bNVL\b", 835.0, "H100 NVL"),
    (r"\bH[18]00\b.*\bPCIe\b", 756.0, "H100 PCIe"),
    (r"\bH[18]00\b", 989.0, "H100 SXM"),
    (r"\bH20\b", 148.0, "H20"),
    (r"\bA[18]00\b", 312.0, "A100"),
    (r"\bL40S\b", 362.0, "L40S"),
    (r"\bMI300X\b", 1307.4, "MI300X"),
)


def matmul_parameters(model: ModelConfig) -> int:
    """Weights that every token is multiplied with: qkv, o, mlp and the head; no embedding."""
    q_rows = model.num_heads * model.dim_per_head
    kv_rows = 2 * model.kv_heads * model.dim_per_head
    attention = (q_rows + kv_rows + q_rows) * model.hidden_size
    mlp = (3 if model.gated else 2) * model.ffn_size * model.hidden_size
    return model.num_layers * (attention + mlp) + model.vocab * model.hidden_size


def window_share(seq_len: int, window: int | None) -> float:
    """Share of the causal (query, key) pairs that a window of `window` tokens keeps.

    The window counts the query's own token; None or a window of the whole sequence keeps all.
    """
    if window is None or window >= seq_len:
        return 1.0
    kept_pairs = window * seq_len - window * (window - 1) // 2
    return kept_pairs / (seq_len * (seq_len + 1) // 2)


def flops_per_token(model: ModelConfig, seq_len: int, causal: Causal = "full") -> float:
    """Forward and backward FLOPs of one token at `seq_len`, by the named attention convention."""
    width = model.num_heads * model.dim_per_head
    attention = 12 * model.num_layers * width * seq_len * (1.0 if causal == "full" else 0.5)
    return 6 * matmul_parameters(model) + attention * window_share(seq_len, model.attention_window)


def mfu(
    tokens_per_s: float, flops_a_token: float, num_devices: int, peak_tflops_a_device: float
) -> float:
    """Model FLOPs utilisation as a fraction; `tokens_per_s` is that of all devices together."""
    return tokens_per_s * flops_a_token / (num_devices * peak_tflops_a_device * 1e12)


def peak_tflops(device_name: str) -> tuple[float, str] | None:
    """(dense bf16 TFLOP/s, name of the table's row) of a device as its driver names it.

    None for a device that is not in the table, and for a slice of one (MIG).
    """
    if "MIG" in device_name:
        return None
    for pattern, peak, name in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return peak, name
    return None


def format_bytes(num_bytes: float) -> str:
    """Binary units, two decimals: 1095216660 -> '1.02GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f}B" if unit == "B" else f"{num_bytes:.2f}{unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f}TiB"


def format_count(number: float) -> str:
    """Decimal units, three significant digits: 174_700_000_000 -> '175B', 4_730_000 -> '4.73M'."""
    return _scaled(number, ("", "K", "M", "B", "T"))


def _scaled(number: float, units: tuple[str, ...]) -> str:
    index = 0
    while abs(number) >= 999.5 and index < len(units) - 1:
        number, index = number / 1000, index + 1
    digits = max(0, 3 - len(str(int(abs(number))))) if index else 0
    return f"{number:.{digits}f}{units[index]}"
