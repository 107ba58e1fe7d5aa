"""`RUN/last_checkpoint.json`: what the run committed or loaded last, told by its folder.

It lies beside the checkpoints' folder, which may be another storage that goes away: then a resume
is refused instead of starting anew, or goes on from the remote.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megascale.checkpoint.durable import write_durably
from megascale.errors import CheckpointError
from megascale.train.sources import Place, Saved

logger = logging.getLogger(__name__)


class LastCheckpoint:
    """The record of the run in `folder`. For one rank."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "last_checkpoint.json"

    def read(self) -> Saved | None:
        """None where nothing was saved; CheckpointError where the record cannot be read."""
        try:
            record = json.loads(self.file.read_bytes())
            place: Place = "remote" if record.get("place") == "remote" else "disk"
            return Saved(place, str(record["name"]))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(
                f"{self.file} is damaged, so this run did save a checkpoint, but none is there; "
                "put the checkpoints back, or start a new run with --set job.run_dir=ANOTHER"
            ) from None

    def read_if_whole(self) -> Saved | None:
        """None also where the record is damaged: checkpoints may be whole."""
        try:
            return self.read()
        except CheckpointError:
            return None

    def write(self, saved: Saved) -> None:
        """A disk that is full costs the record, nothing else."""
        entry = {"step": saved.step, "name": saved.name, "place": saved.place}
        record = json.dumps(entry).encode() + b"\n"
        try:
            if not self.file.exists() or self.file.read_bytes() != record:
                write_durably(self.file, record)
        except OSError as error:
            logger.warning("%s was not written: %s", self.file, error)
