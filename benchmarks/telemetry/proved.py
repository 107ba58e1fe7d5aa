"""Lines of the table that count cases, and the times of the page: by the tests that hold them.

    python -m benchmarks.telemetry.proved [--only LINE ...] [--commit SHA]

A test per case plants something and asks for exactly that; the row is the share of the cases that
passed. Real ranks: some ten minutes on two cores. The times of the page are those that its tests at
12,288 ranks left, in headless Chromium on this machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.arguments import writable_file
from benchmarks.telemetry.rows import RESULTS, Rows

TIMES = Path("runs/dashboard-screens/times.json")
PAGE = "tests/telemetry/dashboard/test_large.py"


@dataclass(frozen=True)
class Cases:
    """The tests `tests`, at least so many, of runs of `ranks`."""

    of: str
    ranks: int
    tests: tuple[str, ...]
    least: int


LINES: Mapping[str, Cases] = {
    "hang": Cases(
        "real ranks, each kind of group, seeded",
        8,
        ("tests/telemetry/test_hangs.py::test_thirty_hangs",),
        30,
    ),
    "hang synthetic": Cases(
        "synthetic records, four kinds of hang, 30 seeds each",
        12288,
        ("tests/telemetry/diagnose/test_ongoing.py::test_twelve_thousand_ranks",),
        4,
    ),
    "trace": Cases(
        "schema, nesting, arrows in pairs: recorded runs of five layouts",
        8,
        ("tests/telemetry/timeline/test_recorded.py",),
        5,
    ),
}


def passed(tests: tuple[str, ...]) -> tuple[int, int]:
    """(passed, all) of `tests`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-m",
            "not gpu and not multi_gpu",
        ]
        subprocess.run([*command, f"--junitxml={report}", *tests], check=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest wrote no report"
    counts = {
        name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")
    }
    return counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"], counts[
        "tests"
    ]


def _page(rows: Rows) -> None:
    TIMES.unlink(missing_ok=True)
    good, all_ = passed((PAGE,))
    if good < all_:
        raise SystemExit(f"{all_ - good} of {all_} tests of the page failed: its times are no rows")
    times = {name: float(ms) for name, ms in json.loads(TIMES.read_text()).items()}
    of, ranks = "headless Chromium", 12288
    rows.add("page first paint", "ms", times["first paint"], "<=", 3000.0, of=of, ranks=ranks)
    interactions = {name: ms for name, ms in times.items() if ": " in name}
    worst = max(interactions, key=lambda name: interactions[name])
    rows.add(
        "page interaction, worst",
        "ms",
        interactions[worst],
        "<=",
        200.0,
        of=of,
        ranks=ranks,
        which=worst,
        times_ms=times,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[*LINES, "page"], choices=[*LINES, "page"])
    parser.add_argument("--output", type=writable_file, default=RESULTS)
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    rows = Rows("python -m benchmarks.telemetry.proved", arguments.commit, arguments.output)
    for line in arguments.only:
        if line == "page":
            _page(rows)
            continue
        cases = LINES[line]
        good, all_ = passed(cases.tests)
        if all_ < cases.least:
            raise SystemExit(f"{line}: {all_} cases ran, at least {cases.least} belong to it")
        share = good / all_
        rows.add(line, "share right", share, ">=", 1.0, of=cases.of, ranks=cases.ranks, cases=all_)


if __name__ == "__main__":
    main()
