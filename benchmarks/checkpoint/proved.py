"""Lines of the table that count cases: by the tests that hold them, which CI runs too.

    python -m benchmarks.checkpoint.proved [--only LINE ...] [--commit SHA]

The value is the share of the tests that passed; one of them may stand for many cases, which `of`
says. About three minutes on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.arguments import writable_file
from benchmarks.checkpoint.rows import Line, write_rows
from megascale.train.bench.rows import Origin

_MATRIX = "tests/checkpoint/test_layout_matrix.py"
_KILLS = "tests/checkpoint/kills/test_kills.py"


@dataclass(frozen=True)
class Cases:
    """of     what the tests hold; `least`: of them"""

    of: str
    tests: tuple[str, ...]
    least: int


LINES: Mapping[str, Cases] = {
    "kills": Cases(
        "kill -9 at 200 seeded instants of saves, and at every point of one: the newest complete "
        "state loads bitwise, complete states are steps run",
        (
            f"{_KILLS}::test_killed_at_200_instants",
            f"{_KILLS}::test_killed_at_every_point_of_a_save",
        ),
        4,
    ),
    "reads-dp4": Cases(
        "four data ranks restart: bytes read from the storage are those of the files, hashes "
        "included",
        (f"{_MATRIX}::test_a_restart_of_four_data_ranks_reads_each_byte_once",),
        1,
    ),
    "reshard": Cases(
        "81 pairs of (TP, PP, VP, DP, ZeRO), real ranks: bitwise, each byte read once",
        (_MATRIX,),
        9,
    ),
}


def passed(cases: Cases) -> tuple[int, int, float]:
    """Tests that passed, of how many, seconds. Skipped ones count as not passed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not gpu and not slow"]
        since = time.monotonic()
        subprocess.run([*command, f"--junitxml={report}", *cases.tests], check=False)
        seconds = time.monotonic() - since
        found = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [case for case in found if len(case) and case[0].tag in ("failure", "error", "skipped")]
    return len(found) - len(bad), max(len(found), cases.least), seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=sorted(LINES), default=[])
    parser.add_argument("--output", type=writable_file)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    origin = Origin.here(
        num_ranks=0,
        on_gpus=False,
        command="python -m benchmarks.checkpoint.proved"
        + "".join(f" --only {line}" for line in given.only),
        given_commit=given.commit or None,
    )
    for line in given.only or LINES:
        good, num, seconds = passed(LINES[line])
        case = {"line": line, "of": LINES[line].of}
        more = {"tests": num, "seconds": round(seconds, 1)}
        row = Line(case, "share of the cases", good / num, (">=", 1.0), more)
        write_rows([row], origin, given.output)


if __name__ == "__main__":
    main()
