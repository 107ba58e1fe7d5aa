"""Steps of a given length on few cores: each micro-batch sleeps as long as it is told to.

For `megascale chaos`, whose ranks share the cores of one machine: beside their orders
(`faults.py`) lies a table of seconds, a row a step and a column a rank, which it wrote by its noise
model. The collectives and the small model are real; what a GPU would compute is slept.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import sleep

from megascale.telemetry.hooks import Hook
from megascale.train.assemble import Assembly


def pace_file(orders: str | Path) -> Path:
    """Where the table is: a JSON list `[step][rank]` of seconds, used in turn."""
    return Path(orders).parent / "pace.json"


class Pace(Hook):
    """Of one rank."""

    def __init__(self, table: Path, assembly: Assembly, global_rank: int) -> None:
        self._seconds_S = [row[global_rank] for row in json.loads(table.read_text())]
        training, num_data = assembly.config.training, assembly.mesh.data
        self._passes = training.global_batch_size // (training.micro_batch_size * num_data)
        self._pause_s = 0.0
        next(iter(assembly.chunks.values())).register_forward_pre_hook(self._wait)

    def on_step_start(self, step: int) -> None:
        self._pause_s = self._seconds_S[step % len(self._seconds_S)] / self._passes

    def _wait(self, _module: object, _inputs: object) -> None:
        sleep(self._pause_s)
