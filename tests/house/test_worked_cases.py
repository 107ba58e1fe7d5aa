"""The worked cases of docs/diagnosis.md: real runs with a fault, which the readers name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools.blocks import ROOT


def _found(case: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "examples/worked_cases.py", case, "--folder", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.full
def test_hang(tmp_path: Path) -> None:
    assert "rank 2 on" in _found("hang", tmp_path)
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in _told(one)]
    assert left == [], "its ranks would wait for each other for ever"


def _told(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or ())


@pytest.mark.full
def test_network_congestion(tmp_path: Path) -> None:
    assert "mlx5_2/1 was congested" in _found("network_congestion", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("slow_node", "slower than the 3 peers of the stage"),
        ("late_launcher", "cause: garbage collection"),
        ("memory_pressure", "memory of rank 2 grows"),
    ],
)
def test_two_minutes_of_training(tmp_path: Path, case: str, said: str) -> None:
    assert said in _found(case, tmp_path)
