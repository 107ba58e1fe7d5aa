"""Layouts on GPUs against one GPU: fp32 closely, bf16 within its rounding."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from megascale.env import child_environment, free_port
from tests.train import raising_rank
from tests.train.command import flags, write_recipe
from tests.train.harness import TINY, run_layout

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


@pytest.mark.multi_gpu
@pytest.mark.timeout(200)
def test_a_rank_that_raises_ends_though_peers_wait_for_it(tmp_path: Path) -> None:
    """The receive that NCCL has posted never comes; the rank tells its error and ends."""
    options = [*TINY, *SHAPE, "parallelism.pipeline_parallel_size=2", "model.num_layers=4"]
    options += ["training.device=cuda", f"job.run_dir={tmp_path / 'run'}"]
    arguments = ["train", str(write_recipe(tmp_path)), *flags(options)]
    port = free_port()
    with ExitStack() as ranks:
        processes = [ranks.enter_context(_raising_rank(r, port, arguments)) for r in range(2)]
        for process in processes:
            ranks.callback(process.kill)
        _, words = processes[0].communicate(timeout=120)
        assert processes[0].returncode != 0
        assert raising_rank.WORDS in words


def _raising_rank(rank: int, port: int, arguments: list[str]) -> subprocess.Popen[str]:
    world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "tests.train.raising_rank", *arguments]
    return subprocess.Popen(
        command, env=child_environment(world), stderr=subprocess.PIPE, text=True
    )
