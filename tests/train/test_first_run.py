"""The recipe of `make train`, on four ranks and a part of its steps, learns from real text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.data import prepare


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_first_run_gets_well_under_the_unigram_entropy(tmp_path: Path) -> None:
    meta = prepare(["stdlib"], "train:BPE:4096", tmp_path / "data")
    settings = {
        "job.run_dir": tmp_path / "run",
        "data.path": tmp_path / "data",
        "training.steps": 70,
        "validation.interval": 70,
        "checkpoint.interval": 0,
    }
    flags = [part for item in settings.items() for part in ("--set", "{}={}".format(*item))]
    command = [sys.executable, "-m", "megascale", "run", "recipes/first-run.toml", *flags]
    ranks = ["--nodes", "1", "--procs-per-node", "4"]
    run = subprocess.run(
        [*command, *ranks], check=True, timeout=280, capture_output=True, text=True
    )
    assert " step: 20  loss: " in run.stdout
    assert " nats, " in run.stdout, "what `benchmarks/first_run.py` reads"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    loss = json.loads(lines[-1])["validation_loss"]
    assert loss <= meta.unigram_entropy_nats - 0.5
    sample = subprocess.run(
        [sys.executable, "-m", "megascale", "generate", tmp_path / "run", "--prompt", "def "],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sample.stdout.startswith("def ")
    assert len(sample.stdout) > 10
