"""Rows of our own benchmarks as cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import ConfigError
from megascale.plan.machine.load import load_cluster
from megascale.plan.validate.own import read_own, settings_of

CASE = {
    "model": "gpt3-175b-4l", "tp": 2, "pp": 1, "vp": 1, "dp": 1, "mbs": 4, "gbs": 64, "seq": 2048,
    "block": "serial", "attention": "full", "recompute": "none", "flux": "auto",
}  # fmt: skip
FOUND: dict[str, Any] = {
    "bench": "step",
    "case": CASE,
    "step_s": 5.2,
    "peak_gb": 87.5,
    "dirty": False,
    "time": "2026-01-01T00:00:00Z",
    "settings": {"schedule": "none", "share_head": False, "join_weight_gradients": 1},
    "forms": {"a": "chunked", "b": "chunked", "c": "fused"},
}


def _written(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_newest_clean_row_of_a_case_counts(tmp_path: Path) -> None:
    newer = FOUND | {"step_s": 5.1, "time": "2026-01-02T00:00:00Z"}
    dirty = FOUND | {"step_s": 9.9, "time": "2026-01-03T00:00:00Z", "dirty": True}
    rows = read_own(_written(tmp_path, newer, FOUND, dirty), load_cluster("h200"))
    assert [row.measured_s for row in rows] == [5.1]
    case = rows[0].case
    assert case.software.tensor_overlap == "chunked"  # the most frequent form
    assert (case.layout.tensor, case.layout.micro_batch_size, case.micro_batches) == (2, 4, 16)
    assert case.job.model.hidden_size == 12288
    assert rows[0].memory_gb == 87.5


def test_older_rows_say_their_settings_in_the_command() -> None:
    command = "megascale bench step R --set parallelism.join_weight_gradients=4 --nproc 2"
    told = {k: v for k, v in FOUND.items() if k != "settings"} | {"command": command}
    assert settings_of(told) == {
        "schedule": "1f1b",
        "share_head": False,
        "join_weight_gradients": 4,
    }
    assert settings_of(told | {"command": "megascale bench step R"}) is None


def test_rows_of_unknown_models_and_absent_files_are_no_rows(tmp_path: Path) -> None:
    assert read_own(tmp_path / "none", load_cluster("h200")) == []
    other = FOUND | {"case": CASE | {"model": "something"}}
    assert read_own(_written(tmp_path, other), load_cluster("h200")) == []


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    (tmp_path / "step.jsonl").write_text('{"bench": "step"}\n')
    with pytest.raises(ConfigError, match=r"step\.jsonl:1: not a result row"):
        read_own(tmp_path, load_cluster("h200"))
