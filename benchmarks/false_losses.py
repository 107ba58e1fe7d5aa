"""An hour in which nothing is wrong and every core is busy: what does the driver believe?

    python -m benchmarks.false_losses [--seconds 3600] [--nodes 2] [--spinners CORES]

A job of real agents and ranks trains beside processes that spin, one a core. The value is how many
nodes were lost or evicted, and how often ranks were started again, though there was no fault; the
target is none. What cost nothing is told beside it: `flaps` are incidents of nodes that were silent
for `cluster.suspect_after_s` and heard again, `incidents` are the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.arguments import writable_file
from benchmarks.chaos import RESULTS, origin
from benchmarks.endless import SETTINGS
from megascale.cluster.chaos.observe import Journal, Turn
from megascale.cluster.job import JobState

START_S = 240.0  # on busy cores


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.false_losses")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--spinners", type=int, default=os.cpu_count())
    parser.add_argument("--recipe", type=Path, default=Path("recipes/first-run.toml"))
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    given = parser.parse_args()
    began = origin()
    run = Path("runs") / f"false-losses-{time.strftime('%Y%m%d-%H%M%S')}"
    with _spinning(given.spinners), _training(given.recipe, given.nodes, run) as driver:
        journal = Journal(run / "driver" / "journal.sqlite")
        trained_s = _watch(driver, journal, given.seconds)
    journal.read()
    row = {**_row(journal, trained_s, given), **began}
    row["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with given.output.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row, indent=1))
    sys.exit(0 if row["met"] else 1)


def _watch(driver: subprocess.Popen[bytes], journal: Journal, seconds: float) -> float:
    """Seconds from the first step to the last that was seen, or to the driver's own end."""
    first_s: float | None = None
    began = last = time.monotonic()
    while first_s is None or last - first_s < seconds:
        if driver.poll() is not None:
            break
        last = time.monotonic()
        journal.read()
        if first_s is None and any(turn.event == "StepReached" for turn in journal.turns):
            first_s = last
        if first_s is None and last - began > START_S:
            sys.exit(f"no step within {START_S:.0f} s: see the driver's words above")
        time.sleep(1.0)
    return 0.0 if first_s is None else last - first_s


def _row(journal: Journal, trained_s: float, given: argparse.Namespace) -> dict[str, Any]:
    counted = count(journal.turns)
    value = counted["lost"] + counted["restarts"]
    return {
        "bench": "chaos",
        "case": {"line": "false-losses", "fault": "none", "schedule": "false_losses"},
        "metric": "count",
        "value": value,
        **counted,
        "seconds": round(trained_s, 1),
        "spinners": given.spinners,
        "load": round(os.getloadavg()[2], 1),
        "target": {"op": "<=", "value": 0.0},
        "met": value == 0 and trained_s >= given.seconds - 2,
        "baselines": {},
    }


def count(turns: Sequence[Turn]) -> dict[str, int]:
    """`lost` nodes, also evicted ones; `restarts` of all ranks; `flaps` and other `incidents`."""
    if not turns:
        return dict.fromkeys(("lost", "restarts", "flaps", "incidents"), 0)
    job = turns[-1].job
    lost = sum(len(_lost(turn.job) - _lost(turn.before)) for turn in turns)
    closed = [action for turn in turns for action in turn.did("Closed")]
    flaps = sum(
        one["incident"]["cause"] == "silent" and one["outcome"].startswith("flap") for one in closed
    )
    return {
        "lost": lost,
        "restarts": job.num_restarts,
        "flaps": flaps,
        "incidents": job.num_incidents - flaps,
    }


def _lost(job: JobState) -> set[str]:
    return {node.name for node in job.nodes.values() if node.state in ("lost", "evicted")}


@contextmanager
def _training(recipe: Path, nodes: int, run: Path) -> Iterator[subprocess.Popen[bytes]]:
    words = ["run", str(recipe), "--nodes", str(nodes), "--procs-per-node", "2"]
    for setting in (*SETTINGS, f"job.run_dir={run}"):
        words += ["--set", setting]
    driver = subprocess.Popen(
        [sys.executable, "-m", "megascale", *words], stdout=subprocess.DEVNULL
    )
    try:
        yield driver
    finally:
        if driver.poll() is None:
            driver.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            driver.wait(120.0)
        driver.kill()


@contextmanager
def _spinning(number: int) -> Iterator[None]:
    spinners = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(number)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.terminate()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    main()
