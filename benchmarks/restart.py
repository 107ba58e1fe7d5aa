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
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.endless import SETTINGS
from megascale.cluster.agent.proc import send
from megascale.cluster.chaos.live import JobSpec, LiveJob
from megascale.cluster.driver.tail import Tail
from megascale.errors import LaunchError

NUM_RANKS = 4
STEPS_BETWEEN = 30
PATIENCE_S = 120.0
MOST_BYTES = 64 << 20  # of a look; a look is every 50 ms
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


class Lines:
    """Records of a file that grows, each read once."""

    def __init__(self, file: Path) -> None:
        self._tail = Tail(file, MOST_BYTES)

    def new(self) -> list[dict[str, Any]]:
        found = []
        for line in self._tail.lines():
            try:
                found.append(json.loads(line))
            except ValueError:  # cut by a kill
                continue
        return found


class Steps:
    """Of the run's metrics. newest: the highest step that was seen."""

    def __init__(self, folder: Path) -> None:
        self._lines = Lines(folder / "metrics.jsonl")
        self.newest = 0

    def new(self) -> list[dict[str, Any]]:
        lines = self._lines.new()
        self.newest = max([self.newest, *(line["step"] for line in lines)])
        return lines

    def reached(self, step: int) -> bool | None:
        """True, or None while it is not."""
        self.new()
        return True if self.newest >= step else None


class Starts:
    """Of a rank: when it opened its telemetry, and when it had its state, by the wall clock."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._lines = Lines(folder / "telemetry" / f"rank_{rank:05d}.jsonl")
        self._header_ns, self._offset_ns = 0, 0
        self._newest: tuple[float, float] | None = None

    def since(self, since_s: float) -> tuple[float, float] | None:
        """Of the newest start; None while there is none that is later."""
        for line in self._lines.new():
            if line["kind"] == "header":
                self._header_ns = line["unix_ns"]
                self._offset_ns = line["unix_ns"] - line["monotonic_ns"]
            if line["kind"] == "span" and line.get("op") == "load":
                loaded_ns = line["t0_ns"] + line["dur_ns"] + self._offset_ns
                self._newest = self._header_ns / 1e9, loaded_ns / 1e9
        return self._newest if self._newest and self._newest[0] > since_s else None


def _kill(job: LiveJob, rank: int, steps: Steps, starts: Sequence[Starts]) -> Parts:
    """Kill one and wait; the parts of this restart."""
    folder = job.spec.folder
    steps.new()
    old_step = steps.newest
    now = job.rank(rank)
    epoch, killed_s = now.epoch, time.time()
    send(now.identity, signal.SIGKILL)

    def new_step() -> float | None:
        new = [line for line in steps.new() if line["time"] > killed_s]
        return next((line["time"] for line in new if line["step"] > old_step + 1), None)

    first_new_s = _until(new_step, "a new step")
    told, stopped, checked, check = _journal(folder, killed_s)
    ordered, headers, begun = 0.0, 0.0, 0.0
    for number, of in enumerate(starts):
        log = (folder / "logs" / f"rank{number:05d}.log").read_text(errors="replace")
        words = log.rpartition(f" rank {number} starts in epoch {epoch + 1}")[0].split()
        ordered = max(ordered, datetime.fromisoformat(words[-1]).timestamp())
        look = partial(of.since, killed_s)
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
    steps, starts = Steps(folder), [Starts(folder, rank) for rank in range(NUM_RANKS)]
    try:
        job.start_driver()
        for number in range(given.kills):
            wanted = steps.newest + STEPS_BETWEEN
            _until(partial(steps.reached, wanted), f"step {wanted}")
            load = os.getloadavg()[0]
            found.append(_kill(job, (3 * number + 1) % NUM_RANKS, steps, starts))
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
