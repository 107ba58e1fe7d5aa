"""Where a restart's time goes: ranks are killed in turn, and each part is read from the run folder.

    python -m benchmarks.restart [--recipe R] [--kills N] [--set KEY=VALUE]

Two nodes of two ranks on this machine, default settings. Prints a row a part: median, best and
worst over the kills, in seconds. Parts follow each other. The journal gives told, stopped and
checked; the ranks' logs when they were told who they are; their telemetry the rest. The first new
step is one that nobody had done, and that all ranks finished.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.endless import SETTINGS
from megascale.cluster.agent.proc import send
from megascale.cluster.chaos.live import JobSpec, LiveJob
from megascale.errors import LaunchError

NUM_RANKS = 4
STEPS_BETWEEN = 30
PATIENCE_S = 120.0
T = TypeVar("T")
Parts = dict[str, float]


def _until(look: Callable[[], T | None], what: str) -> T:
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        found = look()
        if found is not None:
            return found
        time.sleep(0.05)
    raise LaunchError(f"{what} did not happen in {PATIENCE_S:.0f} s")


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the last one is being written
                continue


def _kill(job: LiveJob, rank: int) -> Parts:
    """Kill one and wait; the parts of this restart."""
    folder = job.spec.folder
    old_step = max(line["step"] for line in _lines(folder / "metrics.jsonl"))
    now = job.rank(rank)
    epoch, killed_s = now.epoch, time.time()
    send(now.identity, signal.SIGKILL)

    def new_step() -> float | None:
        new = [line for line in _lines(folder / "metrics.jsonl") if line["time"] > killed_s]
        return next((line["time"] for line in new if line["step"] > old_step + 1), None)

    first_new_s = _until(new_step, "a new step")
    told, stopped, checked, check = _journal(folder, killed_s)
    ordered, headers, begun = 0.0, 0.0, 0.0
    for number in range(NUM_RANKS):
        log = (folder / "logs" / f"rank{number:05d}.log").read_text(errors="replace")
        words = log.rpartition(f" rank {number} starts in epoch {epoch + 1}")[0].split()
        ordered = max(ordered, datetime.fromisoformat(words[-1]).timestamp())
        look = partial(_telemetry, folder, number, killed_s)
        header, loaded = _until(look, f"telemetry of rank {number}")
        headers, begun = max(headers, header), max(begun, loaded)
    return {
        "the death is told": told - killed_s,
        "all ranks are gone": stopped - told,
        "self-check": checked - stopped,
        **{f"  {one['name']}": one["seconds"] for one in check["checks"] if one["seconds"] > 0.01},
        "ranks are told who they are": ordered - checked,
        "recipe, process group": headers - ordered,
        "assembly, state from memory": begun - headers,
        "steps to the first new one": first_new_s - begun,
        "in all": first_new_s - killed_s,
    }


def _journal(folder: Path, since_s: float) -> tuple[float, float, float, dict[str, Any]]:
    """(told, stopped, checked) by the wall clock, and the check's report."""
    database = sqlite3.connect(f"file:{folder}/driver/journal.sqlite?mode=ro", uri=True)
    query = "SELECT kind, json, unix_s FROM transitions WHERE unix_s >= ? ORDER BY id"
    rows = [(kind, json.loads(text), s) for kind, text, s in database.execute(query, (since_s,))]
    database.close()
    told = next(s for kind, _, s in rows if kind == "RankExited")
    stopped = max(s for kind, entry, s in rows if kind == "CommandDone" and _stop(entry))
    checked, report = next((s, entry["event"]) for kind, entry, s in rows if kind == "CheckDone")
    return told, stopped, checked, report["evidence"]


def _stop(entry: dict[str, Any]) -> bool:
    return bool(entry["event"]["order"] == "stop")


def _telemetry(folder: Path, rank: int, since_s: float) -> tuple[float, float] | None:
    """When the rank opened its telemetry, and when it had its state, by the wall clock; None while
    that is not written."""
    header_ns, offset_ns = 0, 0
    for line in _lines(folder / "telemetry" / f"rank_{rank:05d}.jsonl"):
        if line["kind"] == "header":
            header_ns, offset_ns = line["unix_ns"], line["unix_ns"] - line["monotonic_ns"]
        is_load = line["kind"] == "span" and line.get("op") == "load"
        if is_load and header_ns / 1e9 > since_s:
            return header_ns / 1e9, (line["t0_ns"] + line["dur_ns"] + offset_ns) / 1e9
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/first-run.toml"))
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="restart-"))
    settings = (*SETTINGS, *given.set)
    job = LiveJob(JobSpec(given.recipe, settings, folder, nodes=2, procs_per_node=2, spares=0))
    found: list[Parts] = []
    try:
        job.start_driver()
        for number in range(given.kills):
            done = max((line["step"] for line in _lines(folder / "metrics.jsonl")), default=0)
            wanted = done + STEPS_BETWEEN

            def far(wanted: int = wanted) -> bool | None:
                steps = [line["step"] for line in _lines(folder / "metrics.jsonl")]
                return True if steps and steps[-1] >= wanted else None

            _until(far, f"step {wanted}")
            load = os.getloadavg()[0]
            found.append(_kill(job, (3 * number + 1) % NUM_RANKS))
            print(f"kill {number}: {found[-1]['in all']:.2f} s, load {load:.1f}", file=sys.stderr)
    finally:
        job.end()
        job.end_by_force()
        shutil.rmtree(folder, ignore_errors=True)
    print("| part | median | best | worst |\n|---|---|---|---|")
    for part in dict.fromkeys(part for parts in found for part in parts):
        values = [parts.get(part, 0.0) for parts in found]
        name = part if not part.startswith(" ") else f"&nbsp;&nbsp;of it: {part.strip()}"
        print(f"| {name} | {median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


if __name__ == "__main__":
    main()
