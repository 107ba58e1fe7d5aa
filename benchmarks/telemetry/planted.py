"""Are planted faults found, and nobody else named? Straggler, late launcher, and clean windows.

    python -m benchmarks.telemetry.planted [--seeds 5] [--windows 1000]

straggler         3 % in one rank of 12,288, of the noise of `megascale/cluster/chaos/noise.json`,
                  through the store and reader `stragglers` with its default window (300 steps);
                  the share of seeds in which exactly that rank is named
false alarms      clean windows of 30 steps of 12,288 ranks, judged one after another as the driver
                  does (10 windows are remembered); how many name anybody
late launcher     one rank starts the gradient reduce-scatter 5 % late, through the store and reader
                  `late`; the share of seeds and layouts in which exactly that rank is named
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import writable_file
from benchmarks.telemetry.faults import LateLauncher, SlowRank
from benchmarks.telemetry.rows import RESULTS, Rows
from benchmarks.telemetry.synthetic import Job, write_segments
from megascale.cluster.chaos.noise import Noise
from megascale.telemetry.diagnose.straggler import WINDOW_STEPS, Window, stragglers, window
from megascale.telemetry.readers import READERS
from megascale.telemetry.readers.answer import Window as Asked
from megascale.telemetry.store.run import open_run
from megascale.topology import Mesh

LARGE = Mesh(8, 192, 8)
LATE_MESHES = (Mesh(1, 8, 1), Mesh(2, 4, 1), Mesh(2, 4, 2), Mesh(4, 8, 2))
REMEMBERED = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.telemetry.planted")
    parser.add_argument("--seeds", type=int, default=5, help="of the straggler")
    parser.add_argument("--late-seeds", type=int, default=30)
    parser.add_argument("--windows", type=int, default=1000)
    parser.add_argument("--only", default="straggler,late,clean")
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    parser.add_argument("--commit", default="", help="of a clean copy without repository")
    given = parser.parse_args()
    only = given.only.split(",")
    command = "python -m benchmarks.telemetry.planted " + " ".join(
        f"--{name} {value}"
        for name, value in (
            ("seeds", given.seeds), ("late-seeds", given.late_seeds), ("windows", given.windows)
        )
    )  # fmt: skip
    rows = Rows(command, given.commit, given.output)
    met = True
    if "straggler" in only:
        met = _straggler(rows, given.seeds) and met
    if "late" in only:
        met = _late(rows, given.late_seeds) and met
    if "clean" in only:
        met = _clean(rows, given.windows) and met
    return 0 if met else 1


def _straggler(rows: Rows, seeds: int) -> bool:
    found = wrong = 0
    shares = []
    for seed in range(seeds):
        guilty = (7_777 + 2_503 * seed) % LARGE.world_size
        with tempfile.TemporaryDirectory(prefix="megascale-planted-") as temporary:
            folder = Path(temporary) / "run"
            faults = [SlowRank(guilty, 0.03)]
            job = Job(mesh=LARGE, num_steps=300, seed=seed, faults=faults, span_steps=[])
            write_segments(folder, job)
            with open_run(folder, catch_up=False) as run:
                answer = READERS["stragglers"].ask(run, Asked())
        named = answer.data["ranks"]
        found += guilty in named
        wrong += len(set(named) - {guilty})
        shares += [s for r, s in zip(named, answer.data["share"], strict=True) if r == guilty]
        print(f"seed {seed}, rank {guilty}: {answer.summary}", file=sys.stderr)
    beside: dict[str, Any] = {"seeds": seeds, "others_named": wrong, "shares": shares}
    of, ranks, line = "300 steps", LARGE.world_size, "straggler of 3 %"
    exact = rows.add(line, "share found", found / seeds, ">=", 1.0, of=of, ranks=ranks, **beside)
    others = rows.add(line, "others named", wrong, "<=", 0.0, of=of, ranks=ranks, seeds=seeds)
    return exact and others


def _late(rows: Rows, seeds: int) -> bool:
    found = wrong = 0
    for seed in range(seeds):
        mesh = LATE_MESHES[seed % len(LATE_MESHES)]
        guilty = (5 * seed + 3) % mesh.world_size
        with tempfile.TemporaryDirectory(prefix="megascale-planted-") as temporary:
            folder = Path(temporary) / "run"
            faults = [LateLauncher(guilty, 0.05)]
            write_segments(folder, Job(mesh=mesh, num_steps=200, seed=seed, faults=faults))
            with open_run(folder, catch_up=False) as run:
                answer = READERS["late"].ask(run, Asked())
        named = answer.data["ranks"]
        found += guilty in named
        wrong += len(set(named) - {guilty})
        if named != [guilty]:
            print(f"seed {seed}, {mesh}, rank {guilty}: {answer.summary}", file=sys.stderr)
    of = f"5 % of a step, {seeds} seeds"
    most = max(mesh.world_size for mesh in LATE_MESHES)
    exact = rows.add("late launcher", "share found", found / seeds, ">=", 1.0, of=of, ranks=most)
    others = rows.add("late launcher", "others named", wrong, "<=", 0.0, of=of, ranks=most)
    return exact and others


def _clean(rows: Rows, num_windows: int) -> bool:
    stage_R = np.arange(LARGE.world_size) // (LARGE.tensor * LARGE.data)
    noise, windows = Noise(stage_R, seed=2026), list[Window]()
    alarms = 0
    since = time.monotonic()
    for number in range(num_windows):
        last_step = (number + 1) * WINDOW_STEPS
        windows = [*windows, window(noise.steps(WINDOW_STEPS), stage_R, last_step)][-REMEMBERED:]
        finding = stragglers(windows, stage_R)
        if finding is not None:
            alarms += 1
            print(f"window {number}: {finding.told()}", file=sys.stderr)
    return rows.add(
        "false alarms", "windows", alarms, "<=", 0.0, of=f"{num_windows} clean windows",
        ranks=LARGE.world_size, seconds=round(time.monotonic() - since, 1),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
