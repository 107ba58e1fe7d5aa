"""The waterfall by CUDA events: classes are the step, little is left over, delays are found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.blocks import ROOT

WIDE = [
    *("model.preset=null", "model.hidden_size=4096", "model.num_layers=4", "model.num_heads=32"),
    *("model.ffn_hidden_size=16384", "model.vocab_size=32000", "training.global_batch_size=8"),
    *("model.norm=layernorm", "model.activation=gelu_tanh", "model.bias=all"),
]
LAYOUTS = {
    "tp2": ["parallelism.tensor_parallel_size=2"],
    "pp2-vp2": [
        *("parallelism.tensor_parallel_size=1", "parallelism.pipeline_parallel_size=2"),
        "parallelism.virtual_pipeline_size=2",
    ],
    "dp2": ["parallelism.tensor_parallel_size=1"],
}


@pytest.mark.multi_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_classes_are_the_step_and_what_is_exposed_is_what_communication_costs(
    layout: str, tmp_path: Path
) -> None:
    output = tmp_path / "waterfall.jsonl"
    settings = [part for one in [*WIDE, *LAYOUTS[layout]] for part in ("--set", one)]
    recipe = str(ROOT / "recipes" / "bench-175b-4l.toml")
    command = ["-m", "megascale", "bench", "step", recipe, "--nproc", "2", *settings]
    result = subprocess.run(
        [sys.executable, *command, "--waterfall", "--without-communication", f"--output={output}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    row: dict[str, Any] = json.loads(output.read_text())
    assert sum(row["ms"].values()) == pytest.approx(row["step_ms"])
    assert row["value"] < 0.03, row["details_ms"]
    assert abs(row["cross_check"]["difference"]) < 0.03, row["cross_check"]
    assert row["ms"]["gemm_ideal"] > 0.3 * row["step_ms"]
    assert row["lead_ms"] > 0, "the host is behind its device"
