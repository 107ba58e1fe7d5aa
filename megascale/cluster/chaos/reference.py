"""The run without faults that a job is compared with: the same ranks, without driver and agents."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from megascale.cluster.chaos.verify import read_metrics
from megascale.env import child_environment

LOOK_S = 0.2
# A remote is of one run: the job's refuses another's checkpoints, and is no place for them.
_NO_REMOTE = (
    'checkpoint.remote=""',
    "checkpoint.remote_interval=0",
    "checkpoint.remote_interval_minutes=0",
)
REFERENCE_S = 1800.0


def run_reference(
    recipe: Path, overrides: tuple[str, ...], folder: Path, world_size: int, newest: int
) -> Path:
    """The same ranks without driver and faults, up to step `newest`; its run folder."""
    own = (*overrides, *_NO_REMOTE, f'job.run_dir="{folder}"')
    words = [word for override in own for word in ("--set", override)]
    words += ["--nproc", str(world_size)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megascale", "train", str(recipe), *words],
            stdout=log,
            stderr=log,
            env=child_environment({}),
            start_new_session=True,
        )
    deadline_s = time.monotonic() + REFERENCE_S
    try:
        while process.poll() is None and time.monotonic() < deadline_s:
            rows = read_metrics(folder)
            if rows and rows[-1]["step"] >= newest:
                process.send_signal(signal.SIGTERM)
                process.wait(60.0)
            time.sleep(LOOK_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return folder
