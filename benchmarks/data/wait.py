"""How long a step waits for its data: the span `data_wait` of every rank, in a real training.

    python -m benchmarks.data.wait --data FOLDER [--recipe R] [--nproc N] [--set KEY=VALUE]

FOLDER is one of `megascale data prepare`. The row is the largest median over ranks, as a share of
the step; the largest single wait behind the warm-up lies with it, and the bytes of the node's ring
of batches, which all of its ranks share.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from benchmarks.telemetry.runs import median_step_s
from megascale.events import Sums, read_events
from megascale.train.bench.rows import Origin

MOST = 0.001  # of the step
SECONDS = 550.0


@dataclass(frozen=True)
class Waits:
    """median_s, most_s  of a step's wait, of the rank that waits most; step_s: median"""

    median_s: float
    most_s: float
    step_s: float


def measure(recipe: Path, data: Path, overrides: Sequence[str], nproc: int, warm_up: int) -> Waits:
    """Train once, and read every rank's sums."""
    folder = Path(tempfile.mkdtemp(prefix="data-wait-"))
    try:
        command = [sys.executable, "-m", "megascale", "train", str(recipe), "--nproc", str(nproc)]
        fixed = ["data.synthetic=false", f"data.path={data}", f"job.run_dir={folder / 'run'}"]
        fixed += ["checkpoint.enable=false", "metrics.tensorboard=false", "validation.interval=0"]
        for override in (*fixed, *overrides):
            command += ["--set", override]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if ended.returncode:
            raise SystemExit(f"training failed: {ended.stdout[-1500:]}{ended.stderr[-1500:]}")
        files = sorted((folder / "run" / "telemetry").glob("rank_*.jsonl"))
        waits = [_waits_s(file, warm_up) for file in files]
        worst = max(waits, key=statistics.median)
        step_s = median_step_s(folder / "run", warm_up)
        return Waits(statistics.median(worst), max(map(max, waits)), step_s)
    finally:
        shutil.rmtree(folder)


def _waits_s(file: Path, after: int) -> list[float]:
    return [
        event.sums.get("data_wait", {"total_ns": 0})["total_ns"] * 1e-9
        for event in read_events(file)
        if isinstance(event, Sums) and event.step > after
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/bench-7b.toml"))
    parser.add_argument("--model", default="7b")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    found = measure(
        arguments.recipe,
        arguments.data,
        arguments.overrides,
        arguments.nproc,
        arguments.warm_up,
    )
    origin = Origin.here(
        num_ranks=arguments.nproc,
        on_gpus=torch.cuda.device_count() > 0,
        command=f"python -m benchmarks.data.wait --data PREPARED --recipe {arguments.recipe} "
        f"--model {arguments.model} --nproc {arguments.nproc} --warm-up {arguments.warm_up}"
        + "".join(f" --set {override}" for override in arguments.overrides),
        given_commit=arguments.commit or None,
    )
    line = Line(
        {"line": "wait", "of": arguments.model, "ranks": arguments.nproc},
        "share of a step",
        found.median_s / found.step_s,
        ("<=", MOST),
        {"median_s": found.median_s, "most_s": found.most_s, "step_s": found.step_s},
    )
    write_rows([line], origin, arguments.output, bench="data")


if __name__ == "__main__":
    main()
