"""The run that a job is compared with is the same but for what only one run can have."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megascale.cluster.chaos import reference
from megascale.config import load_config


class _Ended:
    def poll(self) -> int:
        return 0


def test_a_reference_leaves_the_remote_of_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[checkpoint]\ninterval = 4\nremote = "{tmp_path}/remote"\nremote_interval = 8\n'
    )
    started: list[list[str]] = []

    def popen(words: list[str], **_: Any) -> _Ended:
        started.append(words)
        return _Ended()

    monkeypatch.setattr(subprocess, "Popen", popen)
    overrides = ("checkpoint.remote_interval_minutes=5.0", "checkpoint.keep_latest_k=10")
    folder = tmp_path / "reference"
    assert reference.run_reference(recipe, overrides, folder, 2, 12) == folder
    [words] = started
    own = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    config = load_config(recipe, own)
    assert (config.checkpoint.remote, config.checkpoint.remote_interval) == ("", 0)
    assert config.checkpoint.remote_interval_minutes == 0.0
    assert (config.checkpoint.interval, config.checkpoint.keep_latest_k) == (4, 10)
    assert Path(config.job.run_dir) == folder
