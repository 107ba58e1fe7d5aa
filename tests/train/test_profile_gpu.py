"""Profiles of a run on a GPU, and what is left of one whose memory ran out."""

from __future__ import annotations

import gzip
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.env import child_environment
from megascale.events import Incident, read_events
from megascale.telemetry.profiling import profile_run
from megascale.telemetry.writer import line_file
from tests.train.command import (
    FRESH,
    SMALL,
    end,
    flags,
    num_lines,
    started,
    wait_until,
    write_recipe,
)

pytestmark = pytest.mark.gpu

ON_GPU = [*SMALL, "training.device=cuda", "checkpoint.enable=false"]


def test_kernels_and_allocations_of_a_run_that_lives(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*ON_GPU, f"job.run_dir={run}", "training.steps=1000000"]
    with started(["train", str(write_recipe(tmp_path)), *flags(settings)], FRESH) as process:
        wait_until(lambda: num_lines(run / "metrics.jsonl") >= 3, process)
        said: list[str] = []
        for what in ("torch", "memory"):
            profile_run(run, what=what, num_steps=2, ranks=None, name=what, say=said.append)
        process.send_signal(15)
        code, _, errors = end(process)
    assert code == 0, errors
    with gzip.open(run / "profiles" / "torch" / "rank_00000.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) > 20
    snapshot = pickle.loads((run / "profiles" / "memory" / "rank_00000.pickle").read_bytes())
    history = snapshot["device_traces"][0]
    assert {"alloc", "free_completed"} <= {entry["action"] for entry in history}
    frames = [frame["name"] for entry in history for frame in entry.get("frames", ())]
    assert "train_step" in frames
    assert snapshot["segments"]


_LITTLE_MEMORY = """
import torch
torch.cuda.set_per_process_memory_fraction(256 * 2**20 / torch.cuda.mem_get_info()[1])
from megascale.cli import main
main()
"""


def test_out_of_memory_ends_as_ever_and_leaves_what_was_held(tmp_path: Path) -> None:
    run = tmp_path / "run"
    big = ["model.hidden_size=1024", "model.ffn_hidden_size=4096", "model.num_layers=8"]
    settings = [*ON_GPU, *big, f"job.run_dir={run}", "training.steps=2"]
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            _LITTLE_MEMORY,
            "train",
            str(write_recipe(tmp_path)),
            *flags(settings),
        ],
        env=child_environment({}),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 1
    assert "OutOfMemoryError: CUDA out of memory" in ended.stderr
    path = run / "profiles" / "out-of-memory" / "rank_00000.pickle"
    held = sum(s["allocated_size"] for s in pickle.loads(path.read_bytes())["segments"])
    assert 32 * 2**20 < held < 256 * 2**20
    incidents = [e for e in read_events(line_file(run, 0)) if isinstance(e, Incident)]
    (incident,) = [e for e in incidents if e.name == "out_of_memory"]
    assert incident.detail["snapshot"] == str(path)
