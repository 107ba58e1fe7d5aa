"""FLOPs and MFU against the paper's printed numbers and against counting by hand."""

from __future__ import annotations

import pytest

from megascale.config.model import ModelConfig
from megascale.units import (
    Causal,
    flops_per_token,
    format_bytes,
    format_count,
    matmul_parameters,
    mfu,
    peak_tflops,
    window_share,
)

PAPER_175B = ModelConfig(preset="megascale-175b")
PAPER_530B = ModelConfig(preset="megascale-530b")

# MegaScale Table 2, Megatron-LM: GPUs, tokens a second, printed MFU in percent.
TABLE_2 = [
    (256, 39.3e3, 53.0),
    (512, 74.1e3, 49.9),
    (768, 103.8e3, 46.7),
    (1024, 132.7e3, 44.7),
    (3072, 433.6e3, 48.7),
    (6144, 851.6e3, 47.8),
    (8192, 1027.9e3, 43.3),
    (12288, 1466.8e3, 41.2),
]


def test_flops_of_the_papers_models_to_all_printed_digits() -> None:
    assert f"{flops_per_token(PAPER_175B, 2048):.9e}" == "1.077386674e+12"
    assert f"{flops_per_token(PAPER_175B, 2048, 'half'):.6e}" == "1.062891e+12"
    assert f"{flops_per_token(PAPER_530B, 2048):.6e}" == "3.231606e+12"


@pytest.mark.parametrize("preset", ["gpt3-125m", "gpt3-175b", "megascale-530b", "tiny-gpt"])
@pytest.mark.parametrize("seq_len", [128, 2048])
def test_gpt_equals_the_closed_formula(preset: str, seq_len: int) -> None:
    model = ModelConfig(preset=preset)
    layers, h, v = model.num_layers, model.hidden_size, model.vocab
    closed = 72 * layers * h**2 * (1 + seq_len / (6 * h) + v / (12 * layers * h))
    assert flops_per_token(model, seq_len) == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize(("num_gpus", "tokens_per_s", "printed"), TABLE_2)
def test_table_2_rows(num_gpus: int, tokens_per_s: float, printed: float) -> None:
    value = mfu(tokens_per_s, flops_per_token(PAPER_175B, 2048), num_gpus, 312.0)
    # 0.1 point between two figures that are both printed to 0.1
    assert round(100 * value, 1) == pytest.approx(printed, abs=0.1 + 1e-9)


def test_the_worked_row() -> None:
    flops = flops_per_token(PAPER_175B, 2048)
    tokens_per_s = 6144 * 2048 / 8.57
    assert round(tokens_per_s) == 1_468_251
    assert round(100 * mfu(tokens_per_s, flops, 12288, 312.0), 1) == 41.3
    assert round(100 * mfu(1466.8e3, flops, 12288, 312.0), 1) == 41.2


def test_grouped_query_and_gated_mlp_counted_by_hand() -> None:
    llama = ModelConfig(preset="llama3-8b")
    a_layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert matmul_parameters(llama) == 32 * a_layer + 128256 * 4096
    attention = flops_per_token(llama, 8192) - 6 * matmul_parameters(llama)
    assert attention == 12 * 32 * 4096 * 8192


def test_head_dim_apart_from_hidden_size() -> None:
    qwen = ModelConfig(preset="tiny-qwen3")  # 4 heads of 32 on a hidden size of 64
    a_layer = 64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 160
    assert matmul_parameters(qwen) == 4 * a_layer + 512 * 64
    assert flops_per_token(qwen, 10) - 6 * matmul_parameters(qwen) == 12 * 4 * 128 * 10


@pytest.mark.parametrize("window", [1, 7, 16, 31, 32, 40])
def test_window_share_equals_counting_pairs(window: int) -> None:
    pairs = [(q, k) for q in range(32) for k in range(q + 1)]
    kept = [(q, k) for q, k in pairs if q - k < window]
    assert window_share(32, window) == len(kept) / len(pairs)


def test_window_shares_of_the_paper() -> None:
    assert [round(100 * window_share(2048, w), 1) for w in (512, 768, 1024)] == [43.7, 60.9, 75.0]
    assert window_share(2048, None) == 1.0


@pytest.mark.parametrize("causal", ["full", "half"])
def test_a_window_scales_the_attention_term_of_both_conventions(causal: Causal) -> None:
    full = ModelConfig(preset="gpt3-1.3b")
    window = ModelConfig(preset="gpt3-1.3b", attention_window=512)
    matmuls = 6 * matmul_parameters(full)
    kept = (flops_per_token(window, 2048, causal) - matmuls) / (
        flops_per_token(full, 2048, causal) - matmuls
    )
    assert kept == pytest.approx(window_share(2048, 512), rel=1e-12)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", (989.0, "H200")),
        ("NVIDIA H100 80GB HBM3", (989.0, "H100 SXM")),
        ("NVIDIA H100 PCIe", (756.0, "H100 PCIe")),
        ("NVIDIA H100 NVL", (835.0, "H100 NVL")),
        ("NVIDIA H200 NVL", (835.0, "H200 NVL")),
        ("NVIDIA A100-SXM4-80GB", (312.0, "A100")),
        ("NVIDIA H20", (148.0, "H20")),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce GT 710", None),
        ("cpu", None),
    ],
)
def test_peaks(device: str, expected: tuple[float, str] | None) -> None:
    assert peak_tflops(device) == expected


def test_formatting() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 1.02 * 2**30, 3 * 2**40)] == [
        "0B",
        "1023B",
        "1.50KiB",
        "1.02GiB",
        "3.00TiB",
    ]
    assert [format_count(n) for n in (512, 4_730_000, 13.1e9, 174.7e9, 999_600)] == [
        "512",
        "4.73M",
        "13.1B",
        "175B",
        "1.00M",
    ]
