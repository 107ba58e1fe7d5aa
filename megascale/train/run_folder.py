"""The folder of one run.

    config.json        resolved configuration        run.json     commit, versions, command, starts
    metrics.jsonl      one line a logged step        tb/          TensorBoard
    telemetry/         recorded events, one file of lines a rank
    checkpoints/       step-N folders                logs/        output of local ranks
    tokenizer.json     (and tokenizer_config.json) copied from the data, so that the folder alone
                       can generate and export

A folder holds one run. Starting in a folder that holds one is refused unless resume is asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megascale import __version__
from megascale.config import RunConfig, load_config
from megascale.env import installed_versions
from megascale.errors import CheckpointError, ConfigError


class RunFolder:
    """Paths and records of a run; creating the object touches nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.run_file = self.path / "run.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"

    @property
    def exists(self) -> bool:
        return self.config_file.exists()

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that holds a run unless `resume`, and resuming where there is none.

        Also one that cannot be made.
        """
        if self.exists and not resume:
            raise ConfigError(
                f"{self.path} already holds a run; continue it with --resume, or start a new one "
                "with --set job.run_dir=ANOTHER"
            )
        if resume and not self.exists:
            raise CheckpointError(
                f"--resume: {self.path} holds no run (no config.json); start without --resume, or "
                "set job.run_dir to the folder of the run"
            )

        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            why = "may not be written to" if there.is_dir() else "is a file"
            raise ConfigError(
                f"the run folder {self.path} cannot be made: {there} {why}; name another one with "
                "--set job.run_dir=ANOTHER"
            )

    def open(self, config: RunConfig, tokenizer_files: Sequence[Path]) -> None:
        """Write the records of this start. Called by one rank.

        A kill or a full disk on the way leaves the old records, so that the run can be resumed.
        """
        try:
            self._write_records(config, tokenizer_files)
        except OSError as error:
            raise CheckpointError(
                f"the run folder {self.path} cannot be written: {error}; free space or mend its "
                "permissions, what it held is untouched"
            ) from error

    def _write_records(self, config: RunConfig, tokenizer_files: Sequence[Path]) -> None:
        from megascale.checkpoint.durable import write_durably  # with torch: not for the parent

        self.path.mkdir(parents=True, exist_ok=True)
        write_durably(self.config_file, config.model_dump_json(indent=2).encode() + b"\n")
        starts = json.loads(self.run_file.read_text())["starts"] if self.run_file.exists() else []
        starts.append(
            {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "command": sys.argv,
                "commit": commit(),
                "versions": {
                    "megascale": __version__,
                    "python": sys.version.split()[0],
                    **installed_versions(("torch", "triton", "numpy", "tokenizers")),
                },
            }
        )
        write_durably(self.run_file, json.dumps({"starts": starts}, indent=2).encode() + b"\n")
        for file in tokenizer_files:
            if file.exists() and not (self.path / file.name).exists():
                shutil.copyfile(file, self.path / file.name)

    def load_config(self) -> RunConfig:
        """The configuration that this run was started with last."""
        if not self.exists:
            raise CheckpointError(f"{self.path} holds no run (no config.json in it)")
        return load_config(self.config_file)


def commit() -> str | None:
    """The commit of the source tree that is running; None outside a repository."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
