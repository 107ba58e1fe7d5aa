"""The folder of one run.

    config.json        resolved configuration        run.json     commit, versions, command, starts
    metrics.jsonl      one line a logged step        tb/          TensorBoard
    telemetry/         recorded events, one file of lines a rank
    profiles/          what `megascale profile` asked for, and what a full GPU held
    checkpoints/       step-N folders                logs/        output of local ranks
    tokenizer.json     (and tokenizer_config.json) copied from the data, so that the folder alone
                       can generate and export
    layout.json        with parallelism.layout = "auto": what was chosen, from how many, and why
    last_checkpoint.json  step of the newest commit: a resume that finds none is refused
    lock               held by rank 0 as long as it lives (`run_lock.py`); names host and process

A folder holds one run. Starting in a folder that holds one is refused unless resume is asked for,
and so is starting where a process is training.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megascale import __version__
from megascale.config import RunConfig, load_config
from megascale.env import agent_environment, installed_versions
from megascale.errors import CheckpointError, ConfigError
from megascale.train.run_lock import RunLock

logger = logging.getLogger(__name__)

_FOLDERS = ("checkpoints", "logs", "tb", "telemetry")
_FILES = ("config.json", "lock", "metrics.jsonl", "run.json", "tokenizer.json")


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

        Also one that cannot be made or written, and one that somebody trains in.
        """
        self._check_possible(resume=resume)
        RunLock(self.path).check()

    @contextmanager
    def hold(self, *, resume: bool, epoch: int = 0) -> Iterator[None]:
        """Check, then keep every other process from training here. Called by rank 0.

        epoch  of a driver's job: who holds the folder for an earlier one loses it (`run_lock.py`)
        """
        self._check_possible(resume=resume)
        lock = RunLock(self.path, epoch)
        descriptor = lock.take()
        try:
            self._check_run(resume=resume)  # again: who held the lock may have left a run
            lock.write_holder(descriptor)
            yield
        finally:
            os.close(descriptor)

    def check_epoch(self) -> None:
        """Raises LaunchError where a driver gave the folder to a later epoch than this rank's."""
        RunLock(self.path, agent_environment().epoch).check_epoch()

    def _check_possible(self, *, resume: bool) -> None:
        self._check_kinds()
        self._check_run(resume=resume)
        self._check_writable()

    def _check_run(self, *, resume: bool) -> None:
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

    def _check_kinds(self) -> None:
        for names, right, wrong in ((_FOLDERS, Path.is_dir, "file"), (_FILES, Path.is_file, "")):
            for path in (self.path / name for name in names):
                if path.exists() and not right(path):
                    raise ConfigError(
                        f"{path} is a {wrong or 'folder'}, a run needs a "
                        f"{'folder' if wrong else 'file'} of that name; move it away, or set "
                        "job.run_dir to another folder"
                    )

    def _check_writable(self) -> None:
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        why = None
        if not there.is_dir():
            why = "is a file"
        elif not os.access(there, os.W_OK):
            why = "may not be written to"
        elif there != self.path:
            try:  # some folders refuse, whatever their permissions say
                tempfile.TemporaryDirectory(dir=there).cleanup()
            except OSError as error:
                why = f"takes no folder ({error.strerror})"
        if why is not None:
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
        starts = self._earlier_starts()
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

    def _earlier_starts(self) -> list[object]:
        """The history so far. One that cannot be read is set aside: nothing depends on it."""
        if not self.run_file.exists():
            return []
        try:
            return list(json.loads(self.run_file.read_text())["starts"])
        except (ValueError, KeyError, TypeError):
            aside = self.run_file.with_name("run.json.damaged")
            self.run_file.replace(aside)
            logger.warning("%s is damaged: moved to %s, begun anew", self.run_file, aside)
            return []

    def load_config(self) -> RunConfig:
        """The configuration that this run was started with last."""
        if not self.exists:
            raise CheckpointError(f"{self.path} holds no run (no config.json in it)")
        return load_config(self.config_file)


def commit() -> str | None:
    """The commit of the source tree that is running; None outside its repository."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # installed inside the repository of somebody else
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    """Output of git beside this file; None where it fails."""
    try:
        found = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
