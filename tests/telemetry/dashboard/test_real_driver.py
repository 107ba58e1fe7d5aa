"""A dashboard that was given the address of a real driver: its job is shown, and a node is taken
out of it from the page's side; the job goes on without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.telemetry.dashboard.served import ask, dashboard, opened
from tests.telemetry.dashboard.waiting import until
from tests.train.command import flags
from tests.train.harness import TINY

SETTINGS = [
    *TINY,
    "model.num_layers=2",
    "training.global_batch_size=4",
    "training.steps=100000",
    "validation.interval=0",
    "checkpoint.interval=20",
    "metrics.tensorboard=false",
    "metrics.log_interval=50",
    "cluster.selfcheck=off",
]
WAIT_S = 60.0


@contextmanager
def _job(folder: Path) -> Iterator[Path]:
    """`megascale run` on two nodes and a spare; the folder of its run."""
    run, recipe = folder / "run", folder / "recipe.toml"
    recipe.write_text("# all defaults\n")
    arguments = ["run", str(recipe), "--nodes", "2", "--procs-per-node", "1", "--spares", "1"]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megascale",
                *arguments,
                *flags([*SETTINGS, f"job.run_dir={run}"]),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )
        try:
            until((run / "config.json").exists, "rank 0 has begun", WAIT_S)
            yield run
        finally:
            process.terminate()
            process.wait(WAIT_S)
    assert process.returncode == 0, (folder / "output").read_text()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_node_is_evicted_by_the_address_of_its_driver(tmp_path: Path) -> None:
    with _job(tmp_path) as run:
        url = json.loads((run / "driver" / "address.json").read_text())["url"]
        token_file = run / "driver" / "token"
        token = token_file.read_text().strip()
        with dashboard(url, token_file=token_file, token=token) as server:

            def status() -> dict[str, Any]:
                found: dict[str, Any] = ask(server, "/api/driver").json()["status"] or {}
                return found

            def trains(epoch: int) -> list[dict[str, Any]]:
                """The nodes with ranks, once the job trains in this epoch."""
                seen = status()
                is_so = (seen.get("phase"), seen.get("epoch")) == ("training", epoch)
                return [n for n in seen["nodes"] if n["ranks"]] if is_so else []

            before = until(lambda: trains(1), "it trains", WAIT_S)
            assert opened(server)["run_dir"] == str(run)
            victim = before[1]["node"]
            body = {"node": victim, "reason": "its fan is loud"}
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            refused = ask(server, "/api/evict", method="POST", body=body)
            assert refused.status == 401
            unknown = {**body, "node": "n99"}
            reply = ask(server, "/api/evict", method="POST", body=unknown, headers=headers)
            assert "n99" in reply.json()["detail"]
            reply = ask(server, "/api/evict", method="POST", body=body, headers=headers)
            assert (reply.status, reply.json()["epoch"]) == (202, 1)
            after = until(lambda: trains(2), "it trains without the node", WAIT_S)
            assert victim not in {node["node"] for node in after}
            assert len(after) == 2, "the spare has its ranks"
            told = until(
                lambda: [
                    o for o in ask(server, "/api/overview").json()["starts"] if o["epoch"] == 2
                ],
                "its second start",
                WAIT_S,
            )
            assert told[0]["num_ranks"] == 2
