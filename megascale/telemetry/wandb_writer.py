"""Weights & Biases as a place for metrics, as `metrics.MetricsLogger` writes to them.

A run of the package is one run folder: its id lies in the folder, so a resumed run goes on there.
The package's own variables count (WANDB_MODE=offline, WANDB_PROJECT, ...): without a network set
WANDB_MODE=offline, and `wandb sync` later.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

PROJECT = "megascale"
INIT_TIMEOUT_S = 60.0
_ID_FILE = "wandb_run_id"


class WandbWriter:
    """Scalars of a step go out together, at `flush`.

    wandb  the package, or something with its `init` and `Settings`
    """

    def __init__(self, run_dir: Path, wandb: Any) -> None:
        self._run = wandb.init(
            dir=str(run_dir),
            id=_run_id(run_dir),
            name=run_dir.resolve().name,
            project=wandb.setup().settings.project or PROJECT,
            resume="allow",
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, console="off"),
        )
        # Its own count of steps only rises; ours goes back after a restart or a rollback.
        self._run.define_metric("*", step_metric="step")
        self._scalars: dict[str, float] = {}

    def add_scalar(self, tag: str, data: float, step: int) -> None:
        self._scalars |= {tag: data, "step": step}

    def flush(self) -> None:
        if self._scalars:
            self._run.log(self._scalars)
            self._scalars = {}

    def close(self) -> None:
        self.flush()
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    file = run_dir / _ID_FILE
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:16] + "\n")
    return file.read_text().strip()
