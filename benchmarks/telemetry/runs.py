"""Training runs for the benches beside this file: started as by a user, read afterwards."""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 60.0

SHARED = (
    "data.synthetic=true",
    "data.path=''",
    "validation.interval=0",
    "checkpoint.enable=false",
    "metrics.tensorboard=false",
    "training.steps=1000000",
)
"""What every run of these benches has in common: no files but the recorder's."""

SMALL_GPU = (
    "model.vocab_size=8192",
    "model.hidden_size=2048",
    "model.num_layers=1",
    "model.num_heads=16",
    "model.num_kv_heads=16",
    "model.ffn_hidden_size=8192",
    "parallelism.tensor_parallel_size=1",
    "training.seq_len=1024",
    "training.micro_batch_size=12",
    "training.dtype=bfloat16",
)
"""A step of some 12 ms on an H200, which the device takes and not the host: with two layers and a
third of the tokens the host needed 11.4 ms to launch a step, and the step followed its moods."""


def train(
    recipe: Path, folder: Path, overrides: Sequence[str], *, nproc: int, seconds: float
) -> None:
    """Train in `folder` until the steps are done, or for `seconds`, after which it is asked to end.
    RuntimeError with the end of its output where it fails."""
    command = [sys.executable, "-m", "megascale", "train", str(recipe), "--nproc", str(nproc)]
    for override in (*SHARED, *overrides, f"job.run_dir={folder}"):
        command += ["--set", override]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    if not (folder / "metrics.jsonl").exists():
        raise RuntimeError(f"{' '.join(command)} left no metrics: {output[-2000:]}")


def logged_step_s(folder: Path, after: int) -> list[float]:
    """Mean step times of the log's lines behind step `after`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found: list[Mapping[str, Any]] = [json.loads(line) for line in lines]
    return [line["step_s"] for line in found if line["step"] > after and "step_s" in line]


def median_step_s(folder: Path, after: int) -> float:
    times = logged_step_s(folder, after)
    assert times, f"{folder} has no line behind step {after}"
    return statistics.median(times)
