"""What recording costs: the same training with everything on and with nothing, in turns.

    python -m benchmarks.telemetry.overhead [--recipe R] [--nproc N] [--rounds N] [--set KEY=VALUE]

On: spans of every phase, sampled as by default, the watch for collectives that do not come, the
node's Prometheus endpoint, and a streamer with a store that commits segments beside the run. Off:
`telemetry.enable=false`. A round is one run of each, in turn which goes first; its ratio compares
the medians of their logged step times behind the warm-up. The row is the median over rounds; with
it lie all ratios, so that their spread is seen.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.arguments import writable_file
from benchmarks.telemetry.runs import SMALL_GPU, median_step_s, train
from megascale.train.bench.rows import Origin

MOST = 0.01  # of the step
LOG_INTERVAL = 10


def measure(
    recipe: Path, overrides: Sequence[str], *, nproc: int, steps: int, warm_up: int, rounds: int
) -> list[tuple[float, float]]:
    """(step with everything on, step without), seconds, of every round."""
    found = []
    for number in range(rounds):
        times: dict[bool, float] = {}
        for enabled in (True, False) if number % 2 else (False, True):
            folder = Path(tempfile.mkdtemp(prefix="overhead-"))
            run_dir = folder / "run"
            run_dir.mkdir()
            mine = [
                f"training.steps={steps}",
                f"metrics.log_interval={LOG_INTERVAL}",
                f"telemetry.enable={str(enabled).lower()}",
            ]
            if enabled:
                mine.append("telemetry.prometheus_port=29400")
            with _streamed(run_dir) if enabled else _nothing():
                train(recipe, run_dir, [*overrides, *mine], nproc=nproc, seconds=600)
            times[enabled] = median_step_s(run_dir, warm_up)
            if enabled and not list((run_dir / "telemetry" / "store").glob("*/positions.json")):
                raise SystemExit("no segment was stored: that is not everything on")
            shutil.rmtree(folder)
        found.append((times[True], times[False]))
        print(f"round {number + 1}: on {times[True]:.5f} s, off {times[False]:.5f} s", flush=True)
    return found


@contextmanager
def _streamed(run_dir: Path) -> Iterator[None]:
    """A streamer and a store beside the run, as a cluster has them."""
    command = [sys.executable, "-m", "megascale", "stream", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        finally:
            process.terminate()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", type=Path, default=Path("recipes/first-run.toml"))
    parser.add_argument("--model", default="small")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    overrides = arguments.overrides or [*SMALL_GPU, "training.global_batch_size=12"]
    rounds = measure(
        arguments.recipe,
        overrides,
        nproc=arguments.nproc,
        steps=arguments.steps,
        warm_up=arguments.warm_up,
        rounds=arguments.rounds,
    )
    ratios = [on / off - 1 for on, off in rounds]
    origin = Origin.here(
        num_ranks=arguments.nproc,
        on_gpus=torch.cuda.device_count() > 0,
        command=f"python -m benchmarks.telemetry.overhead --model {arguments.model} "
        f"--rounds {arguments.rounds} --steps {arguments.steps} --warm-up {arguments.warm_up}"
        + "".join(f" --set {override}" for override in arguments.overrides),
        given_commit=arguments.commit or None,
    )
    value = statistics.median(ratios)
    row = {
        "bench": "telemetry",
        "case": {"line": "overhead", "of": arguments.model, "ranks": arguments.nproc},
        "metric": "share of a step",
        "value": round(value, 5),
        "target": {"op": "<=", "value": MOST},
        "met": value <= MOST,
        "ratios": [round(one, 5) for one in ratios],
        "step_s": statistics.median(off for _, off in rounds),
        **origin.now(),
    }
    print(json.dumps(row))
    if arguments.output:
        with arguments.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
