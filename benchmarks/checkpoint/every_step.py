"""The state saved to memory at every step: what a step pays for it (MegaScale 4.4, ByteRobust).

    python -m benchmarks.checkpoint.every_step [--recipe R] [--nproc N] [--rounds N] [--set K=V]

A round is one training with `checkpoint.memory_interval=1` and one without, in turn which goes
first. Blocking is the difference of their median steps behind the warm-up; it may be

    max(0, bytes / rate - window) + 10 ms

with `rate` the device-to-host copy measured first, in this run (`stage_one.py`), and `window` the
part of a step in which nothing changes the state: all of it but the optimizer's span. The slots
are where an agent would put them, in /dev/shm, with a place for each rank.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from benchmarks.checkpoint.stage_one import copy_rate_of_a_process
from benchmarks.telemetry.runs import SHARED, median_step_s
from megascale.env import MEMORY_SLOTS, START, child_environment, free_port
from megascale.events import Sums, read_events
from megascale.train.bench.rows import Origin

SHARE = 0.992  # of MFU, where the window holds the copy
SPARE_S = 0.010
SECONDS = 550.0  # of a run


@dataclass(frozen=True)
class Run:
    """step_s, optimizer_s  medians; state_bytes  of the fullest rank's slot (0: without)"""

    step_s: float
    optimizer_s: float
    state_bytes: int


def train(recipe: Path, overrides: Sequence[str], *, nproc: int, warm_up: int, keep: bool) -> Run:
    """One run; its slots are removed."""
    with _folders() as (run_dir, slots):
        mine = [f"checkpoint.memory_interval={int(keep)}", f"checkpoint.enable={str(keep).lower()}"]
        mine += ["checkpoint.save_at_end=false", "checkpoint.memory_copies=false"]
        port, start = free_port(), os.urandom(8).hex()
        ranks = [
            subprocess.Popen(
                _command(recipe, run_dir, [*overrides, *mine]),
                env=_environment(rank, nproc, port, start, slots),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(nproc)
        ]
        try:
            outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        failed = [out for rank, out in zip(ranks, outputs, strict=True) if rank.returncode]
        if failed:
            raise SystemExit(f"training failed: {failed[0][-3000:]}")
        sizes = [file.stat().st_size for file in slots.glob("*own*")]
        if keep and not sizes:
            raise SystemExit(f"nothing was kept in memory: {outputs[0][-3000:]}")
        optimizer = _span_s(run_dir / "telemetry", "optimizer", warm_up)
        return Run(median_step_s(run_dir, warm_up), optimizer, max(sizes, default=0))


def _command(recipe: Path, run_dir: Path, overrides: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "megascale", "train", str(recipe)]
    shared = [one for one in SHARED if not one.startswith(("training.steps", "checkpoint."))]
    for override in (*shared, *overrides, f"job.run_dir={run_dir}"):
        command += ["--set", override]
    return command


def _environment(rank: int, nproc: int, port: int, start: str, slots: Path) -> dict[str, str]:
    mine = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        START: start,
        MEMORY_SLOTS: str(slots / f"rank{rank:05d}"),
    }
    return child_environment(mine)


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """Of the run, and of its slots in memory."""
    run_dir = Path(tempfile.mkdtemp(prefix="every-step-"))
    slots = Path(tempfile.mkdtemp(prefix="megascale-bench-", dir="/dev/shm"))
    try:
        yield run_dir, slots
    finally:
        shutil.rmtree(slots)
        shutil.rmtree(run_dir)


def _span_s(telemetry: Path, name: str, after: int) -> float:
    """Median of rank 0's sums of a span, seconds a step."""
    sums = [
        event.sums[name]["total_ns"] * 1e-9
        for event in read_events(telemetry / "rank_00000.jsonl")
        if isinstance(event, Sums) and event.step > after and name in event.sums
    ]
    return statistics.median(sums)


def lines(rounds: Sequence[tuple[Run, Run]], rate: float, model: str, nproc: int) -> list[Line]:
    """`rounds`: (with, without) each; `rate`: bytes per second of a copy to the host."""
    blocking = [kept.step_s - bare.step_s for kept, bare in rounds]
    shares = [bare.step_s / kept.step_s for kept, bare in rounds]
    step_s = statistics.median(bare.step_s for _, bare in rounds)
    state_bytes = rounds[0][0].state_bytes
    window_s = step_s - statistics.median(bare.optimizer_s for _, bare in rounds)
    copy_s = state_bytes / rate
    more = {
        "step_s": step_s,
        "window_s": window_s,
        "copy_s": copy_s,
        "state_bytes": state_bytes,
        "host_bytes": 2 * state_bytes * nproc,
        "rounds": len(rounds),
    }
    over = copy_s > window_s
    case = {"of": model, "ranks": nproc}
    return [
        Line(
            {"line": "every-step-blocking", **case},
            "s",
            statistics.median(blocking),
            ("<=", max(0.0, copy_s - window_s) + SPARE_S),
            {**more, "all": blocking},
        ),
        Line(
            {"line": "every-step-mfu", **case},
            "share of MFU without",
            statistics.median(shares),
            None if over else (">=", SHARE),
            {**more, "all": shares},
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", type=Path, default=Path("recipes/bench-7b.toml"))
    parser.add_argument("--model", default="7b")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    overrides = [*arguments.overrides, f"training.steps={arguments.steps}"]
    rate = copy_rate_of_a_process()
    print(f"device to host: {rate / 1e9:.1f} GB/s", flush=True)
    rounds = []
    for number in range(arguments.rounds):
        found = {
            keep: train(
                arguments.recipe,
                overrides,
                nproc=arguments.nproc,
                warm_up=arguments.warm_up,
                keep=keep,
            )
            for keep in ((True, False) if number % 2 else (False, True))
        }
        rounds.append((found[True], found[False]))
        print(f"round {number + 1}: with {found[True]}, without {found[False]}", flush=True)
    origin = Origin.here(
        num_ranks=arguments.nproc,
        on_gpus=torch.cuda.device_count() > 0,
        command=f"python -m benchmarks.checkpoint.every_step --recipe {arguments.recipe} "
        f"--model {arguments.model} --nproc {arguments.nproc} --steps {arguments.steps} "
        f"--warm-up {arguments.warm_up} --rounds {arguments.rounds}"
        + "".join(f" --set {override}" for override in arguments.overrides),
        given_commit=arguments.commit or None,
    )
    write_rows(lines(rounds, rate, arguments.model, arguments.nproc), origin, arguments.output)


if __name__ == "__main__":
    main()
