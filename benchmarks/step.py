"""The training step: MFU of `megascale train` itself on synthetic tokens, one row a case.

    python -m benchmarks.step RECIPE --nproc N [--set a.b=c ...] --model NAME
        [--target 0.49] [--baseline megatron_core=0.544]

The step time is the median of the steps after the third (compilation, warm-up, clocks) but the
last, as rank 0 sees it; a step ends with a collective over all ranks, so it is the slowest one's.
The value check before a row is written: every loss is finite, and the first is within 0.5 % of what
random tokens must cost at initialisation, ln(V) + h std^2 / 2: the logits of a normalised hidden
state are normal with variance h std^2.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megascale.config import RunConfig, load_config
from megascale.env import installed_versions
from megascale.train.run_folder import commit

WARM_UP_STEPS = 3


def main() -> None:
    """Run one case and append its row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--model", required=True, help="the case's name of the model")
    parser.add_argument("--target", type=float)
    parser.add_argument("--baseline", action="append", default=[], help="name=mfu")
    parser.add_argument("--commit", help="of a clean tree that was copied without its repository")
    parser.add_argument("--output", default="benchmarks/results/step.jsonl")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*arguments.overrides, f"job.run_dir={folder}/run"]
        flags = [part for override in overrides for part in ("--set", override)]
        command = [sys.executable, "-m", "megascale", "train", arguments.recipe, *flags]
        subprocess.run([*command, "--nproc", str(arguments.nproc)], check=True)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    config = load_config(arguments.recipe, arguments.overrides)
    steps = [json.loads(line) for line in lines]
    check_losses([step["loss"] for step in steps], config)
    row = make_row(config, steps, arguments)
    with Path(arguments.output).open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({key: row[key] for key in ("case", "value", "step_s", "peak_gb", "met")}))


def check_losses(losses: list[float], config: RunConfig) -> None:
    """The value check; stops where the run did not compute what it should."""
    model = config.model
    expected = math.log(model.vocab) + model.hidden_size * model.init_std**2 / 2
    if not all(map(math.isfinite, losses)) or abs(losses[0] / expected - 1) > 0.005:
        raise SystemExit(f"losses {losses} do not begin at {expected:.4f}: no row is written")


def make_row(
    config: RunConfig, steps: list[dict[str, Any]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The row of the finished run (`benchmarks/README.md`)."""
    timed = steps[WARM_UP_STEPS:-1]  # the last step's time includes draining the device
    median = statistics.median(step["step_s"] for step in timed)
    middle = min(timed, key=lambda step: abs(step["step_s"] - median))
    mesh = config.mesh(arguments.nproc)
    cuda = torch.cuda.is_available()
    row: dict[str, Any] = {
        "bench": "step",
        "case": {
            "model": arguments.model,
            "tp": mesh.tensor,
            "pp": mesh.pipeline,
            "vp": config.parallelism.virtual_pipeline_size,
            "dp": mesh.data,
            "mbs": config.training.micro_batch_size,
            "gbs": config.training.global_batch_size,
            "seq": config.training.seq_len,
            "block": config.model.block,
            "attention": "window" if config.model.attention_window else "full",
            "recompute": config.activation_checkpoint.mode,
            "flux": config.parallelism.flux if mesh.tensor > 1 else "none",
        },
        "metric": "mfu",
        "value": middle.get("mfu"),
        "mfu_causal": middle.get("mfu_causal"),
        "step_s": median,
        "tokens_per_s_per_gpu": middle["tokens_per_s_per_gpu"],
        "peak_gb": max(step["memory_bytes"] for step in steps) / 1e9,
        "baselines": {
            name: float(value)
            for name, _, value in (item.partition("=") for item in arguments.baseline)
        },
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "num_devices": arguments.nproc,
        "commit": arguments.commit or commit(),
        "dirty": False if arguments.commit else _dirty(),
        "versions": installed_versions(("torch", "triton")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", "benchmarks.step", *_reproducible(sys.argv[1:])]),
        "stats": {
            "rounds": len(timed),
            "min": min(step["step_s"] for step in timed),
            "max": max(step["step_s"] for step in timed),
        },
    }
    if cuda:
        row["machine"] = machine()
    if arguments.target is not None:
        row["target"] = {"op": ">=", "value": arguments.target}
        row["met"] = row["value"] is not None and row["value"] >= arguments.target
    else:
        row["met"] = None
    return row


def _reproducible(arguments: list[str]) -> list[str]:
    """The arguments that say what was measured; not where the row went, nor the commit again."""
    kept = iter(arguments)
    return [a for a in kept if a not in ("--output", "--commit") or not next(kept)]


def machine() -> dict[str, Any]:
    """What the GPU looks like right after the run; settings are read, never changed."""
    query = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    found = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    values = dict(zip(query.split(","), map(str.strip, found.stdout.split(",")), strict=False))
    return {**values, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _dirty() -> bool:
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    )
    return bool(changed.stdout.strip())


if __name__ == "__main__":
    main()
