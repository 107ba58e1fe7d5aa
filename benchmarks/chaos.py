"""Schedules of faults as rows: every line of the table in docs/reliability.md, and each fault.

    python -m benchmarks.chaos chaos/short.toml chaos/matrix.toml [--recipe R] [--output FILE]

A row's case is {"line", "fault", "schedule"}; a time is the worst of the schedule's faults of that
kind. The value check is the schedule's own: what was decided is compared with what was done, and
the losses, bit for bit, with those of a run without faults. Rows are written met or not; of a fault
that never came so far there is no number and no row, which is a miss.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.arguments import writable_file
from megascale.env import installed_versions
from megascale.train.run_folder import commit

RESULTS = Path("benchmarks/results/chaos.jsonl")
ENDED = ("kill", "segv", "abort", "exit_code")
HUNG = ("sigstop", "skip_collective", "gil", "sleep")
Fault = dict[str, Any]
Row = dict[str, Any]


def _field(name: str) -> Callable[[Fault], float | None]:
    return lambda fault: fault[name]


def _right(fault: Fault) -> float | None:
    return None if fault["right"] is None else float(fault["right"])


@dataclass(frozen=True)
class Target:
    """A line of the table. `value` of each fault of `kinds`; the worst counts."""

    line: str
    metric: str
    op: str
    target: float
    kinds: tuple[str, ...]
    value: Callable[[Fault], float | None]

    def worst(self, faults: list[Fault]) -> float | None:
        """None where a fault did not come so far: then the row says so."""
        values = [self.value(fault) for fault in faults]
        if any(value is None for value in values):
            return None
        known = [value for value in values if value is not None]
        return max(known) if self.op == "<=" else min(known)

    def is_met(self, value: float | None) -> bool:
        if value is None:
            return False
        return value <= self.target if self.op == "<=" else value >= self.target


TARGETS = (
    Target("rank-killed-decision", "s", "<=", 2.0, ENDED, _field("decided_s")),
    Target("rank-killed-first-new-step", "s", "<=", 10.0, ENDED, _field("new_s")),
    Target("hang-named", "s", "<=", 15.0, HUNG, _field("named_s")),
    Target("hang-right-rank", "share", ">=", 1.0, HUNG, _right),
    Target("straggler-named", "s", "<=", 60.0, ("straggler",), _field("noticed_s")),
    Target("straggler-right-rank", "share", ">=", 1.0, ("straggler",), _right),
    Target("node-lost-suspect", "s", "<=", 4.0, ("node_lost", "partition"), _field("suspect_s")),
    Target("node-lost-lost", "s", "<=", 14.0, ("node_lost", "partition"), _field("decided_s")),
    Target("link-down-5s-restarts", "count", "<=", 0.0, ("unplugged",), _field("restarts")),
    Target("fault-to-end-of-self-checks", "s", "<=", 30.0, (*ENDED, *HUNG), _field("checked_s")),
    Target("steps-lost", "steps", "<=", 1.0, (*ENDED, "node_gone"), _field("lost_steps")),
    Target("driver-killed-readopted", "s", "<=", 5.0, ("driver_kill",), _field("readopted_s")),
    Target("driver-killed-restarts", "count", "<=", 0.0, ("driver_kill",), _field("restarts")),
)
ETTR = 0.975  # under chaos/standard.toml


def rows_of(result: dict[str, Any]) -> Iterator[Row]:
    """What a schedule's result says, without when and where it was measured."""
    schedule = result["schedule"]
    faults = [fault for fault in result["faults"] if not fault["skipped"]]
    for target in TARGETS:
        for kind in target.kinds:
            own = [fault for fault in faults if fault["kind"] == kind]
            if own:
                value = target.worst(own)
                row = _row(target.line, kind, schedule, target.metric, value)
                met = target.is_met(value)
                yield {**row, "target": {"op": target.op, "value": target.target}, "met": met}
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        own = [fault for fault in faults if fault["kind"] == kind]
        yield _of_fault(min(own, key=lambda fault: fault["handled"]), schedule)
    if faults:
        handled = sum(fault["handled"] for fault in faults) / len(faults)
        row = _row("handled-without-a-person", "all", schedule, "share", round(handled, 4))
        yield {**row, **_whole(handled), "num_faults": len(faults)}
    for name in ("loss", "samples", "orphans", "pages", "closed", "ledger"):
        checks = [job["checks"][name]["ok"] for job in result["jobs"] if name in job["checks"]]
        if checks:
            share = sum(checks) / len(checks)
            row = _row(f"property-{name}", "all", schedule, "share", round(share, 4))
            yield {**row, **_whole(share), "num_jobs": len(checks)}
    if schedule == "standard":
        for job in result["jobs"]:
            row = _row("ETTR", "all", schedule, "share", round(job["ettr"] or 0.0, 4))
            met = (job["ettr"] or 0.0) >= ETTR
            yield {**row, "target": {"op": ">=", "value": ETTR}, "met": met}


def _of_fault(fault: Fault, schedule: str) -> Row:
    """A fault of the matrix: was it handled, and what was said of it?"""
    row = _row("fault", fault["kind"], schedule, "handled", float(fault["handled"]))
    shown = ("cause", "named", "closing", "wrong", "decided_s", "new_s", "lost_steps", "flaps")
    told = {key: fault[key] for key in shown if fault[key] not in (None, "")}
    right = {None: "nobody is to be named", True: "right", False: "wrong"}[fault["right"]]
    return {**row, **_whole(row["value"]), **told, "named_right": right}


def _row(line: str, fault: str, schedule: str, metric: str, value: float | None) -> Row:
    case = {"line": line, "fault": fault, "schedule": schedule}
    return {"bench": "chaos", "case": case, "metric": metric, "value": value, "baselines": {}}


def _whole(value: float) -> Row:
    return {"target": {"op": ">=", "value": 1.0}, "met": value >= 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos")
    parser.add_argument("schedules", nargs="+", type=Path)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/first-run.toml"))
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    given = parser.parse_args()
    code = 0
    for schedule in given.schedules:
        code = max(code, measure(schedule, given.recipe, given.output))
    sys.exit(code)


def measure(schedule: Path, recipe: Path, output: Path) -> int:
    """Run a schedule and append its rows; the exit code of `megascale chaos`.

    Its run folder stays in runs/chaos: what went wrong is to be read there.
    """
    began = origin()
    words = ["chaos", str(schedule), str(recipe), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "megascale", *words], stdout=subprocess.PIPE, check=False
    )
    if not done.stdout:
        return done.returncode or 1
    result = json.loads(done.stdout)
    with output.open("a") as file:
        for row in rows_of(result):
            told = f"{row['case']['line']}, {row['case']['fault']}"
            if row["value"] is None:
                print(f"{told}: it never came so far")
                continue
            moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            file.write(json.dumps({**row, **began, "time": moment}) + "\n")
            print(f"{told}: {row['value']} {row['metric']}, {row['met']}")
    return done.returncode


def origin() -> Row:
    """Where a row comes from, read before it is measured."""
    changes = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    )
    program = f"python -m benchmarks.{Path(sys.argv[0]).stem}"
    return {
        "device": f"cpu, {os.cpu_count()} cores",
        "num_devices": 0,
        "commit": commit() or "unknown",
        "dirty": bool(changes.stdout.strip()) or changes.returncode != 0,
        "versions": {"python": sys.version.split()[0], **installed_versions(("torch",))},
        "command": " ".join([program, *sys.argv[1:]]),
    }


if __name__ == "__main__":
    main()
