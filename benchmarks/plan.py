"""The validation of the planner as rows: predictions beside what was measured, and its targets.

    python -m benchmarks.plan [--data FILE] [--output FILE]

A row a measured step of the printed sets and of our own (`real` is the measured value, `error`
predicted over it less one), and a row a target. Rows of other projects' sets (`--data`) are counted
in the targets and written nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.arguments import writable_file
from megascale.env import installed_versions
from megascale.plan.validate.campaign import Campaign, run_campaign
from megascale.plan.validate.targets import targets
from megascale.train.run_folder import commit

RESULTS = Path("benchmarks/results/plan.jsonl")
WRITTEN = ("korthikanti", "narayanan", "table2", "fig9", "own")


def main() -> None:
    """Append the rows; say which targets are missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="CSV of measured runs")
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    arguments = parser.parse_args()
    campaign = run_campaign(arguments.data)
    common = _origin()
    rows = [*_steps(campaign), *_rungs(campaign), *_memory(campaign), *_lines(campaign)]
    with arguments.output.open("a") as file:
        file.writelines(json.dumps({"bench": "plan", **row, **common}) + "\n" for row in rows)
    missed = [target.name for target in targets(campaign) if not target.met]
    print(f"{len(rows)} rows; missed: {', '.join(missed) or 'none'}")


def _steps(campaign: Campaign) -> Iterator[dict[str, Any]]:
    for group in campaign.groups:
        for p in group.predicted:
            if p.row.set in WRITTEN:
                yield {
                    "case": _case(p.row.set, p.row.system, p.row.gpus, p.row.model, p.row.label),
                    "metric": "s",
                    "value": round(p.seconds, 4),
                    "baselines": {"real": p.row.measured_s},
                    "error": round(p.error, 5),
                    "fitted": "yes" if group.is_fitted else "no",
                    "met": None,
                }


def _rungs(campaign: Campaign) -> Iterator[dict[str, Any]]:
    """Table 3: MFU, and the gain over the rung below as fractions."""
    rungs = campaign.table3
    for place, p in enumerate(rungs):
        below = rungs[place - 1] if place else p
        yield {
            "case": _case("table3", "megascale", p.row.gpus, p.row.model, p.row.label),
            "metric": "mfu",
            "value": round(p.mfu, 5),
            "baselines": {"real": round(p.measured_mfu, 4)},
            "gain": round(p.mfu - below.mfu, 5),
            "real_gain": round(p.measured_mfu - below.measured_mfu, 5),
            "fitted": "no",
            "met": None,
        }


def _memory(campaign: Campaign) -> Iterator[dict[str, Any]]:
    for check in campaign.memory:
        row = check.row
        yield {
            "case": _case("own", row.system, row.gpus, row.model, row.label),
            "metric": "peak_gb",
            "value": round(check.predicted_gb, 3),
            "baselines": {"real": row.memory_gb},
            "error": round(check.error, 5),
            "fitted": "no",
            "met": None,
        }


def _lines(campaign: Campaign) -> Iterator[dict[str, Any]]:
    for target in targets(campaign):
        yield {
            "case": _case("targets", "megascale-py", 0, "", target.name),
            "metric": target.unit,
            "value": round(target.value, 5),
            "baselines": {},
            "public": target.bar,
            "fitted": target.fitted,
            "target": {"op": "<=", "value": target.limit},
            "met": target.met,
        }


def _case(name: str, system: str, gpus: int, model: str, extra: str) -> dict[str, Any]:
    return {"set": name, "system": system, "gpus": gpus, "model": model, "extra": extra}


def _origin() -> dict[str, Any]:
    status = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    )
    arguments = [word if not word.endswith(".csv") else "FILE" for word in sys.argv[1:]]
    return {
        "device": f"cpu, {os.cpu_count()} cores",
        "num_devices": 0,
        "commit": commit(),
        "dirty": bool(status.stdout.strip()),
        "versions": {"python": sys.version.split()[0], **installed_versions(("numpy",))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["python", "-m", "benchmarks.plan", *arguments]),
    }


if __name__ == "__main__":
    main()
