"""`megascale run` with a queue: agents stream what their ranks record over a real Redis, and the
store has every row of every file once, also after a rank was killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megascale.telemetry.store.run import open_run
from megascale.telemetry.store.segments import store_folder
from tests.telemetry.path.servers import BINARY, RedisServer
from tests.telemetry.path.writers import rows_of_files, rows_of_store
from tests.train.command import flags, num_lines
from tests.train.harness import TINY

SETTINGS = [
    *TINY,
    "model.num_layers=2",
    "training.global_batch_size=4",
    "training.steps=400",
    "validation.interval=0",
    "checkpoint.interval=20",
    "metrics.tensorboard=false",
    "telemetry.span_interval=2",
    "cluster.selfcheck=off",
]
START_S, END_S = 60.0, 100.0


def _trainer(job: psutil.Process, rank: int) -> psutil.Process | None:
    for one in job.children(recursive=True):
        try:
            words, environment = one.cmdline(), one.environ()
        except psutil.Error:
            continue
        if "train" in words and environment.get("RANK") == str(rank):
            return one
    return None


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")
def test_every_row_of_a_job_is_stored_once(tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", tmp_path / "recipe.toml"
    recipe.write_text("# all defaults\n")
    with RedisServer(tmp_path) as server:
        settings = [*SETTINGS, f"job.run_dir={run}", f"telemetry.queue={server.url}"]
        command = ["run", str(recipe), "--nodes", "2", "--procs-per-node", "1", *flags(settings)]
        with subprocess.Popen(
            [sys.executable, "-m", "megascale", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                give_up_s = time.monotonic() + START_S
                while num_lines(run / "metrics.jsonl") < 3:
                    assert process.poll() is None, process.communicate()
                    assert time.monotonic() < give_up_s
                    time.sleep(0.05)
                killed = _trainer(psutil.Process(process.pid), 1)
                assert killed is not None
                killed.send_signal(signal.SIGKILL)
                output, _ = process.communicate(timeout=END_S)
            finally:
                process.terminate()
    assert process.returncode == 0, output
    streamed, written = rows_of_store(store_folder(run)), rows_of_files(run)
    assert streamed <= written, "what came through the queue is stored once"
    # At the end agents wait some seconds for the last of it; what is late is in the files.
    assert streamed.total() > written.total() / 2
    with open_run(run) as stored:
        assert stored.steps() == (1, 400)
        assert len(stored.starts) == 2
        assert stored.caveats() == []
    assert rows_of_store(store_folder(run)) == written
