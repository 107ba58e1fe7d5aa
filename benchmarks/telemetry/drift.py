"""Does a step take as long after 30,000 steps as at first? (MegaScale 6.3, "MFU decreasing")

    python -m benchmarks.telemetry.drift [--steps N] [--seconds S] [--keep FOLDER] [--set KEY=VALUE]

One run of a small model, recorded as by default. Its step times are those of the recorder: on a GPU
the device's clock, which shows no jitter of the host that the device did not wait for. The row is
the slope of a straight line through the medians of every 500 steps, as a share of a step in 10,000
steps. Beside it what the noise model of `cluster/chaos/noise.json` assumes of one rank, measured:
the deviation from step to step, its autocorrelation, and how often and how long a step pauses.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.arguments import writable_file, writable_folder
from benchmarks.telemetry.runs import SMALL_GPU, train
from megascale.events import Step, read_events
from megascale.telemetry.writer import line_file
from megascale.train.bench.rows import Origin

MOST = 0.001  # of a step, in 10,000 steps
BLOCK_STEPS = 500
WARM_UP_STEPS = 500
PAUSED = 1.05  # of the median: longer is a pause


def step_ms(file: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Times of a rank's steps behind the warm-up, in order."""
    return np.array([event.dur_ns / 1e6 for event in _steps(file)][WARM_UP_STEPS:])


def _steps(file: Path) -> list[Step]:
    return [event for event in read_events(file) if isinstance(event, Step)]


def slope(times_ms: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Growth in 10,000 steps, as a share of a step."""
    num_blocks = len(times_ms) // BLOCK_STEPS
    assert num_blocks >= 4, f"{len(times_ms)} steps are too few for a slope"
    blocks = np.median(times_ms[: num_blocks * BLOCK_STEPS].reshape(num_blocks, -1), axis=1)
    at = np.arange(num_blocks) * BLOCK_STEPS
    return float(np.polyfit(at, blocks, 1)[0] * 10_000 / np.median(blocks))


def noise(times_ms: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    """What `noise.json` names of one rank, by its step times."""
    usual = float(np.median(times_ms))
    paused = times_ms > PAUSED * usual
    calm = times_ms[~paused] / usual - 1
    apart = calm - calm.mean()
    return {
        "step_sd": round(float(calm.std()), 6),
        "memory": round(float((apart[1:] * apart[:-1]).mean() / (apart**2).mean()), 4),
        "pause_chance": round(float(paused.mean()), 6),
        "pause_mean": round(float((times_ms[paused] / usual - 1).mean()), 4) if paused.any() else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", type=Path, default=Path("recipes/first-run.toml"))
    parser.add_argument("--model", default="small")
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="at most; then it is ended")
    parser.add_argument(
        "--keep", type=writable_folder, help="put the rank's events there, compressed"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    overrides = arguments.overrides or [*SMALL_GPU, "training.global_batch_size=12"]
    folder = Path(tempfile.mkdtemp(prefix="drift-"))
    train(
        arguments.recipe,
        folder / "run",
        [*overrides, f"training.steps={arguments.steps}", "metrics.log_interval=500"],
        nproc=1,
        seconds=arguments.seconds,
    )
    file = line_file(folder / "run", 0)
    launch_ms = [event.launch_ns / 1e6 for event in _steps(file) if event.launch_ns]
    times_ms = step_ms(file)
    if arguments.keep:
        with (
            file.open("rb") as source,
            gzip.open(arguments.keep / "rank_00000.jsonl.gz", "wb") as to,
        ):
            shutil.copyfileobj(source, to)
    value = slope(times_ms)
    origin = Origin.here(
        num_ranks=1,
        on_gpus=torch.cuda.device_count() > 0,
        command=f"python -m benchmarks.telemetry.drift --model {arguments.model} "
        f"--steps {arguments.steps}"
        + "".join(f" --set {override}" for override in arguments.overrides),
        given_commit=arguments.commit or None,
    )
    row = {
        "bench": "telemetry",
        "case": {"line": "drift", "of": arguments.model, "ranks": 1},
        "metric": "share of a step in 10,000 steps",
        "value": round(abs(value), 6),
        "target": {"op": "<=", "value": MOST},
        "met": abs(value) <= MOST,
        "slope": round(value, 6),
        "steps": len(times_ms) + WARM_UP_STEPS,
        "step_ms": round(float(np.median(times_ms)), 4),
        "thirds_ms": [round(float(np.median(part)), 4) for part in np.array_split(times_ms, 3)],
        "launch_ms": round(float(np.median(launch_ms)), 4) if launch_ms else None,
        "noise": noise(times_ms),
        **origin.now(),
    }
    shutil.rmtree(folder)
    print(json.dumps(row))
    if arguments.output:
        with arguments.output.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
