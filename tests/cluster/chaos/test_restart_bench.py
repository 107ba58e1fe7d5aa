"""Benchmarks of the driver read what grows once, and wait for nobody for ever."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control_plane.__main__ import _first_line
from benchmarks.restart import Starts, Steps
from megascale.errors import LaunchError


def _append(file: Path, *records: dict[str, Any], cut: str = "") -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("a") as opened:
        opened.write("".join(json.dumps(record) + "\n" for record in records) + cut)


def test_steps_are_read_once(tmp_path: Path) -> None:
    file, steps = tmp_path / "metrics.jsonl", Steps(tmp_path)
    assert (steps.new(), steps.reached(1)) == ([], None)
    _append(file, {"step": 1}, {"step": 2}, cut='{"step": ')
    assert [line["step"] for line in steps.new()] == [1, 2]
    _append(file, cut="3}\n")
    assert [line["step"] for line in steps.new()] == [3]
    _append(file, cut='{"st{"step": 9}\n')  # a rank was killed, the next one went on
    _append(file, {"step": 2})
    assert steps.reached(3), "steps are done twice after a restart"
    assert steps.reached(4) is None


def test_the_newest_start_of_a_rank(tmp_path: Path) -> None:
    file, starts = tmp_path / "telemetry" / "rank_00001.jsonl", Starts(tmp_path, 1)
    load = {"kind": "span", "op": "load", "t0_ns": 2 * 10**9, "dur_ns": 10**9}
    _append(file, {"kind": "header", "unix_ns": 50 * 10**9, "monotonic_ns": 10**9}, load)
    assert starts.since(40.0) == (50.0, 52.0)
    assert starts.since(60.0) is None
    _append(file, {"kind": "header", "unix_ns": 70 * 10**9, "monotonic_ns": 10**9})
    assert starts.since(60.0) is None, "it has no state yet"
    _append(file, load)
    assert starts.since(60.0) == (70.0, 72.0)


@pytest.mark.parametrize("program", ["import time; time.sleep(60)", "pass"])
def test_a_driver_that_says_nothing_is_not_waited_for(program: str) -> None:
    command = [sys.executable, "-c", program]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    began_s = time.monotonic()
    try:
        with pytest.raises(LaunchError, match="said no address"):
            _first_line(driver, 1.0)
    finally:
        driver.kill()
        driver.communicate()
    assert time.monotonic() - began_s < 30.0
