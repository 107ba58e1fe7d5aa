"""Faults of a job on two GPUs of one host, as rows: what NCCL and a running device make of them.

    python -m benchmarks.chaos_gpu [--output FILE] [--compare] [--set SECTION.KEY=VALUE]
    python -m benchmarks.chaos_gpu --device cpu        # the same with gloo, to try the program

One node of two ranks, by `chaos/gpu.toml` and `chaos/gpu-straggler.toml`: `megascale chaos` for
each, then a short table, and the rows of `benchmarks/chaos.py` with one line more: how many windows
it took to name the straggler. A row's case is {"line", "fault", "schedule"}. About four minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.arguments import writable_file
from benchmarks.chaos import RESULTS, rows_of
from megascale.cluster.chaos.observe import Journal
from megascale.flux.bench.rows import append
from megascale.train.bench.rows import Origin

SCHEDULES = (Path("chaos/gpu.toml"), Path("chaos/gpu-straggler.toml"))
RECIPE = Path("recipes/first-run.toml")
NUM_RANKS = 2
WINDOW_STEPS, MOST_WINDOWS = 30, 3
ON_CPU = (
    "training.device=cpu",
    "training.dtype=float32",
    "training.seq_len=64",
    "training.micro_batch_size=2",
    "training.global_batch_size=8",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_hidden_size=128",
)
NEEDS = ("pydantic", "fastapi", "uvicorn", "httpx", "pynvml")
COLUMNS = ("fault", "on", "decided s", "named s", "checked s", "new s", "lost", "named", "right")
Fault = dict[str, Any]
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos_gpu")
    parser.add_argument("schedules", nargs="*", type=Path, default=SCHEDULES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--compare", action="store_true", help="losses with those of no faults")
    parser.add_argument("--commit", help="of a tree without its repository")
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    given = parser.parse_args()
    if lacking := _lacking(given.device):
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    origin = Origin.here(
        num_ranks=NUM_RANKS,
        on_gpus=given.device == "cuda",
        command=f"python -m benchmarks.chaos_gpu {' '.join(sys.argv[1:])}".strip(),
        given_commit=given.commit or os.environ.get("COMMIT"),
    )
    code, table = 0, []
    for schedule in given.schedules:
        result = _run(schedule, given)
        if result is None:
            code = 1
            continue
        windows = _windows(result)
        rows = [*rows_of(result), *([] if windows is None else [_windows_row(result, windows)])]
        for row in rows:
            if row["value"] is not None:  # else it never came so far, which is a miss
                append(given.output, {**row, **origin.now()})
        table += [_cells(fault, windows) for fault in result["faults"]]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *table, strict=True)]
    for cells in (COLUMNS, *table):
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)))
    return code


def _lacking(device: str) -> str:
    """What this machine has not, and what to do about it; "" where nothing is lacking."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)} cannot be imported: `make wheels`, docs/gpu-machine.md"
    if shutil.which("py-spy") is None and not Path(sys.executable).with_name("py-spy").exists():
        return (
            "py-spy is not on the PATH, and hangs are not located without stacks: "
            "export PATH=$PWD/deps/bin:$PATH (docs/gpu-machine.md)"
        )
    if device == "cuda":
        import torch

        if torch.cuda.device_count() < NUM_RANKS:
            return f"{torch.cuda.device_count()} GPUs, {NUM_RANKS} are needed; or --device cpu"
    return ""


def _run(schedule: Path, given: argparse.Namespace) -> Row | None:
    """The result of a schedule; None where there is none, and why was printed."""
    folder = Path("runs/chaos") / time.strftime(f"{schedule.stem}-%Y%m%d-%H%M%S")
    words = ["chaos", str(schedule), str(RECIPE), "--json", "--run-dir", str(folder)]
    words += [] if given.compare else ["--no-compare"]
    small = ON_CPU if given.device == "cpu" else ()
    words += [word for one in (*small, *given.overrides) for word in ("--set", one)]
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "megascale", *words], stdout=subprocess.PIPE, check=False
    )
    print(f"{schedule}: {time.monotonic() - began_s:.0f} s, {folder}", file=sys.stderr)
    if not done.stdout:
        return None
    result: Row = json.loads(done.stdout)
    for fault in result["faults"]:
        if fault["wrong"]:
            print(f"{fault['kind']}: {fault['wrong']}", file=sys.stderr)
    return result


def _windows(result: Row) -> int | None:
    """Windows of steps, most of them slow, until the straggler was named."""
    for job in result["jobs"]:
        for fault in (one for one in result["faults"] if one["number"] in job["faults"]):
            if fault["kind"] == "straggler" and fault["step"] is not None:
                found = next(_found(Path(job["folder"]), fault["step"]), None)
                slow = None if found is None else (found - fault["step"] + 1) / WINDOW_STEPS
                return None if slow is None else math.ceil(slow - 0.5)
    return None


def _found(folder: Path, since: int) -> Iterator[int]:
    """Steps behind which a straggler was named for certain."""
    journal = Journal(folder / "driver" / "journal.sqlite")
    for turn in journal.read():
        finding = turn.body.get("finding", {}) if turn.event == "Found" else {}
        if finding.get("kind") == "straggler" and (finding.get("step") or 0) >= since:
            yield int(finding["step"])


def _windows_row(result: Row, windows: int) -> Row:
    return {
        "bench": "chaos",
        "case": {
            "line": "straggler-windows",
            "fault": "straggler",
            "schedule": result["schedule"],
        },
        "metric": "windows",
        "value": float(windows),
        "baselines": {},
        "target": {"op": "<=", "value": float(MOST_WINDOWS)},
        "met": windows <= MOST_WINDOWS,
    }


def _cells(fault: Fault, windows: int | None) -> list[str]:
    moments = [fault[name] for name in ("decided_s", "named_s", "checked_s", "new_s")]
    right = {None: "", True: "right", False: "WRONG"}[fault["right"]]
    if fault["kind"] == "straggler":
        right += f", {'never' if windows is None else f'after {windows} windows'}"
    return [
        fault["kind"],
        fault["target"],
        *("" if moment is None else f"{moment:.1f}" for moment in moments),
        "" if fault["lost_steps"] is None else str(fault["lost_steps"]),
        f"{fault['cause']} {fault['named']}".strip(),
        right,
    ]


if __name__ == "__main__":
    sys.exit(main())
