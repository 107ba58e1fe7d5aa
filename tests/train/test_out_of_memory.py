"""Memory that runs out leaves its evidence, and the error is the same."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.events import Incident
from megascale.telemetry.clock import MonotonicClock
from megascale.telemetry.recorder import Recorder
from megascale.train.out_of_memory import OutOfMemory


def observer(tmp_path: Path) -> tuple[OutOfMemory, list[Any]]:
    events: list[Any] = []
    recorder = Recorder(MonotonicClock(), events.append, rank=3)
    return OutOfMemory(tmp_path / "profiles" / "rank_00003.pickle", recorder), events


def test_the_first_error_leaves_a_snapshot_and_an_incident(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = iter([{"segments": [1]}, {"segments": [2]}])
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: next(snapshots))
    called, events = observer(tmp_path)
    called(0, 1 << 30, 80 << 30, 5)
    called(0, 1 << 20, 80 << 30, 5)  # by who caught the first error: nothing more
    path = tmp_path / "profiles" / "rank_00003.pickle"
    assert pickle.loads(path.read_bytes()) == {"segments": [1]}
    (incident,) = events
    assert isinstance(incident, Incident)
    assert (incident.name, incident.rank) == ("out_of_memory", 3)
    assert incident.detail == {
        "snapshot": str(path),
        "asked_bytes": 1 << 30,
        "free_bytes": 5,
        "limit_bytes": 80 << 30,
    }


def test_a_snapshot_that_fails_does_not_take_the_errors_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise MemoryError("the host's too")

    monkeypatch.setattr(torch.cuda.memory, "_snapshot", broken)
    called, events = observer(tmp_path)
    called(0, 1, 2, 3)
    assert "no snapshot could be written: the host's too" in caplog.text
    assert events == []
    assert list(tmp_path.rglob("*.pickle")) == []


def test_torch_has_the_private_functions() -> None:
    """The observer itself is only in builds for CUDA; `test_profile_gpu.py` calls it."""
    for name in ("_snapshot", "_record_memory_history"):
        assert callable(getattr(torch.cuda.memory, name))
