"""Layouts on GPUs against one GPU: fp32 closely, bf16 within its rounding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.train.harness import run_layout

SINGLE = {"tp": 1, "dp": 1, "pp": 1, "vp": 1, "zero": 1}
TWO = [
    {"tp": 2, "dp": 1, "pp": 1, "vp": 1, "zero": 1},
    {"tp": 1, "dp": 2, "pp": 1, "vp": 1, "zero": 1},
    {"tp": 1, "dp": 2, "pp": 1, "vp": 1, "zero": 2},
    {"tp": 1, "dp": 1, "pp": 2, "vp": 2, "zero": 1},
]
FOUR = [
    {"tp": 4, "dp": 1, "pp": 1, "vp": 1, "zero": 1},
    {"tp": 2, "dp": 2, "pp": 1, "vp": 1, "zero": 1},
    {"tp": 2, "dp": 1, "pp": 2, "vp": 1, "zero": 1},
    {"tp": 1, "dp": 1, "pp": 4, "vp": 2, "zero": 1},
    {"tp": 1, "dp": 4, "pp": 1, "vp": 1, "zero": 2},
]
# Heads of 64 and a sequence of 128: shapes that the fused attention kernels take.
SHAPE = ["model.hidden_size=256", "model.ffn_hidden_size=512", "training.seq_len=128"]
FAMILIES = {
    "gpt": [
        *("model.norm=layernorm", "model.activation=gelu_tanh", "model.position=learned"),
        *("model.bias=all", "model.tie_embeddings=true"),
    ],
    "llama-parallel": ["model.block=parallel"],
}
LR = ["training.device=cuda", "optimizer.lr=0.002"]


def _layouts() -> list[object]:
    import torch

    num_devices = torch.cuda.device_count()
    chosen = TWO + (FOUR if num_devices >= 4 else [])
    return [pytest.param(layout, id=str(layout)) for layout in chosen]


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", _layouts())
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 5e-3)])
def test_layouts_equal_one_gpu(
    layout: dict[str, int], family: str, dtype: str, tolerance: float
) -> None:
    options = [*SHAPE, *LR, *FAMILIES[family], f"training.dtype={dtype}"]
    reference = run_layout(SINGLE, options, 5)[0]
    for outcome in run_layout(layout, options, 5):
        np.testing.assert_allclose(outcome.losses, reference.losses, rtol=tolerance)
        np.testing.assert_allclose(outcome.norms, reference.norms, rtol=100 * tolerance)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_gpu_equals_the_cpu(family: str) -> None:
    options = [*SHAPE, "optimizer.lr=0.002", *FAMILIES[family]]
    cpu = run_layout(SINGLE, options, 5)[0]
    gpu = run_layout(SINGLE, [*options, "training.device=cuda"], 5)[0]
    np.testing.assert_allclose(gpu.losses, cpu.losses, rtol=1e-4)
