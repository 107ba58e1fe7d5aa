"""What a newcomer waits for and gets: `make env` and `make train` in a fresh clone. Three rows.

    python -m benchmarks.first_run

The clone has its own virtual environment, so installation is timed too (downloads or the package
cache of this machine included). The value check is the run's own: it ends with exit code 0 and
prints a validation loss and a sample.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megascale.env import installed_versions
from megascale.train.run_folder import commit

RESULTS = Path("benchmarks/results/first-run.jsonl")
# line of the table, unit of the value, comparison, target
TARGETS = {
    "installed": ("s", "<=", 90.0),
    "installed and trained": ("s", "<=", 240.0),
    "validation loss under the unigram entropy": ("nats", ">=", 0.5),
}


def main() -> None:
    """Clone, install, train, and append the rows."""
    head = commit()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ".", folder], check=True)
        start = time.monotonic()
        _make("env", folder)
        installed_s = time.monotonic() - start
        output = _make("train", folder)
        total_s = time.monotonic() - start
    found = re.search(r"validation loss [\d.]+ nats, (-?[\d.]+) under", output)
    assert found, f"no validation loss in the output: {output[-2000:]}"
    assert "The run is in" in output, output[-2000:]
    values = dict(zip(TARGETS, (installed_s, total_s, float(found[1])), strict=True))
    with RESULTS.open("a") as file:
        for line, value in values.items():
            row = make_row(line, value, head)
            file.write(json.dumps(row) + "\n")
            print(f"{line}: {value:.2f} {row['metric']}, target {row['target']}: {row['met']}")


def make_row(line: str, value: float, head: str | None) -> dict[str, Any]:
    """A row as `benchmarks/README.md` describes it; the clone is always clean."""
    unit, op, target = TARGETS[line]
    return {
        "bench": "first-run",
        "case": {"line": line},
        "metric": unit,
        "value": round(value, 3),
        "baselines": {},
        "target": {"op": op, "value": target},
        "met": value <= target if op == "<=" else value >= target,
        "device": f"cpu, {os.cpu_count()} cores",
        "num_devices": 0,
        "commit": head,
        "dirty": False,
        "versions": {"python": sys.version.split()[0], **installed_versions(("torch",))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": "python -m benchmarks.first_run",
    }


def _make(target: str, folder: str) -> str:
    done = subprocess.run(["make", target], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"make {target}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


if __name__ == "__main__":
    main()
