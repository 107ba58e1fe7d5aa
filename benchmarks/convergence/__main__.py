"""Train every variant, compare the final losses, append their rows and curves.

    python -m benchmarks.convergence --data PREPARED [--at-once 2] [--only NAME] [--output FILE]

First the pilots choose the learning rates (`--adamw-lr`, `--lamb-lr` skip them), then all runs go,
`--at-once` side by side on one GPU, in the order of seeds, so that what is compared runs at the
same time. About 45 s a run on an H200 that has it alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from benchmarks.convergence.variants import BASELINE, PILOTS, VARIANTS, Variant, compare
from megascale.train.bench.rows import Origin

RECIPE = Path("recipes/convergence.toml")
TOKENS_A_SAMPLE = 1024


@dataclass(frozen=True)
class Curve:
    """Of one run: validation losses by tokens seen, and training losses.

    seconds  that it took, start included
    """

    variant: str
    seed: int
    rate: float
    valid: list[tuple[int, float]] = field(default_factory=list)
    train: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def final(self) -> float:
        return self.valid[-1][1]


def run(variant: Variant, seed: int, rate: float, data: Path, more: Sequence[str]) -> Curve:
    """Train once, in a process of its own."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        command = [sys.executable, "-m", "megascale", "train", str(RECIPE)]
        settings = [*variant.settings(seed, rate), *more, f"data.path={data}"]
        for setting in (*settings, f"job.run_dir={folder}/run"):
            command += ["--set", setting]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise SystemExit(f"{variant.name}, seed {seed}: {ended.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    curve = Curve(variant.name, seed, rate, seconds=time.monotonic() - began_s)
    batch = next(int(s.partition("=")[2]) for s in settings if "global_batch_size" in s)
    for metrics in map(json.loads, lines):
        tokens = metrics["step"] * batch * TOKENS_A_SAMPLE
        if "validation_loss" in metrics:
            curve.valid.append((tokens, metrics["validation_loss"]))
        elif "loss" in metrics:
            curve.train.append((tokens, metrics["loss"]))
    print(
        f"{variant.name}, seed {seed}, lr {rate:g}: {curve.final:.4f} nats, {curve.seconds:.0f} s",
        flush=True,
    )
    return curve


def all_runs(
    jobs: Sequence[tuple[Variant, int, float]], data: Path, more: Sequence[str], at_once: int
) -> list[Curve]:
    def one(job: tuple[Variant, int, float]) -> Curve:
        variant, seed, rate = job
        return run(variant, seed, rate, data, more)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, jobs))


def chosen_rate(curves: Sequence[Curve]) -> float:
    return min(curves, key=lambda curve: curve.final).rate


def lines(curves: Sequence[Curve]) -> list[Line]:
    """A row a run, and for each variant beside the baseline whether it is equal."""
    found = [
        Line(
            {"line": "run", "variant": curve.variant, "seed": curve.seed, "lr": curve.rate},
            "nats",
            curve.final,
            more={"valid": curve.valid, "train": curve.train[::4], "seconds": curve.seconds},
        )
        for curve in curves
    ]
    finals: dict[str, list[float]] = {}
    for curve in curves:
        finals.setdefault(curve.variant, []).append(curve.final)
    for name, losses in finals.items():
        if name == BASELINE.name or BASELINE.name not in finals:
            continue
        verdict = compare(losses, finals[BASELINE.name])
        found.append(
            Line(
                {"line": "difference", "variant": name},
                "nats over the baseline",
                abs(verdict.difference),
                ("<=", verdict.allowed),
                {"signed": verdict.difference, "seeds": len(losses)},
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="variants by name")
    parser.add_argument("--adamw-lr", type=float)
    parser.add_argument("--lamb-lr", type=float)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    unknown = set(given.only) - {variant.name for variant in VARIANTS}
    if unknown:
        raise SystemExit(f"no variant {sorted(unknown)}; legal: {[v.name for v in VARIANTS]}")
    given_rates = {"adamw": given.adamw_lr, "lamb": given.lamb_lr}
    rates = {name: rate for name, rate in given_rates.items() if rate is not None}
    open_ = [name for name in given_rates if name not in rates]
    jobs = [
        (variant, variant.seeds[0], rate)
        for name in open_
        for variant, tried in [PILOTS[name]]
        for rate in tried
    ]
    pilots = all_runs(jobs, given.data, given.overrides, given.at_once)
    for name in open_:
        rates[name] = chosen_rate([c for c in pilots if c.variant == PILOTS[name][0].name])
        print(f"{name}: learning rate {rates[name]:g}", flush=True)
    wanted = [v for v in VARIANTS if not given.only or v.name in given.only]
    seeds = sorted({seed for variant in wanted for seed in variant.seeds})
    runs = [(v, seed, rates[v.optimizer]) for seed in seeds for v in wanted if seed in v.seeds]
    curves = all_runs(runs, given.data, given.overrides, given.at_once)
    origin = Origin.here(
        num_ranks=1,
        on_gpus=torch.cuda.device_count() > 0,
        command="python -m benchmarks.convergence --data PREPARED" + _told(given),
        given_commit=given.commit or None,
    )
    write_rows([*lines(pilots), *lines(curves)], origin, given.output, bench="convergence")


def _told(given: argparse.Namespace) -> str:
    words = [f"--only {shlex.quote(name)}" for name in given.only]
    words += [f"--set {setting}" for setting in given.overrides]
    words += [f"--adamw-lr {given.adamw_lr}"] if given.adamw_lr else []
    words += [f"--lamb-lr {given.lamb_lr}"] if given.lamb_lr else []
    return "".join(f" {word}" for word in words)


if __name__ == "__main__":
    main()
