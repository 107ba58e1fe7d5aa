"""`benchmarks/chaos_gpu.py`: the windows it took to name a straggler, and what is asked first."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos_gpu as bench
from megascale.cluster.transitions import Found
from megascale.telemetry.diagnose.finding import Finding
from tests.cluster.chaos.test_judge import Watched


def _result(folder: Path, step: int | None = 71) -> dict[str, Any]:
    fault = {"number": 1, "kind": "straggler", "step": step}
    job = {"folder": str(folder), "faults": [1]}
    return {"schedule": "gpu-straggler", "faults": [fault], "jobs": [job]}


@pytest.mark.parametrize(
    ("named", "windows"),
    [
        ([150], 3),  # 80 steps: of the first window 20 of 30 were slow
        ([165], 3),  # 95: of the first window 5 were
        ([70, 180], 4),  # what was said before the fault is not of it
        ([], None),
    ],
)
def test_windows_that_were_mostly_slow_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[int], windows: int | None
) -> None:
    (tmp_path / "driver").mkdir()
    job = Watched(tmp_path / "driver", monkeypatch)
    for step in named:
        job.go(Found(Finding("slow_rank", (1,), step=step, certain=False)))
        job.go(Found(Finding("straggler", (1,), step=step)))
    result = _result(tmp_path)
    assert bench._windows(result) == windows
    assert bench._windows(_result(tmp_path, step=None)) is None
    if windows is not None:
        row = bench._windows_row(result, windows)
        assert (row["value"], row["met"]) == (windows, windows <= 3)
        assert set(row["case"]) == {"line", "fault", "schedule"}


def test_what_the_machine_lacks_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench._lacking("cpu") == ""
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    assert "py-spy is not on the PATH" in bench._lacking("cpu")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name)
    )
    monkeypatch.setattr(sys, "argv", ["chaos_gpu", "--output", str(tmp_path / "rows")])
    assert bench.main() == 2
    assert "fastapi cannot be imported: `make wheels`" in capsys.readouterr().err
    assert (tmp_path / "rows").read_text() == "", "it can be written, and nothing was measured"
