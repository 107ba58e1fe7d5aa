"""Whose checkpoints a remote holds: one place, one run.

The run puts a word of its own there (`run-id`) and remembers it (`RUN/remote.json`). A new run
beside checkpoints of another would take them for its own at its first restart, so it is refused; so
is resuming with the remote of another run. Whoever lost the run's folder has no word any more, and
is taken for its owner.
"""

from __future__ import annotations

import json
import logging
import secrets
from pathlib import Path

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.durable import write_durably
from megascale.checkpoint.manifest import list_checkpoints
from megascale.errors import CheckpointError, StorageError
from megascale.storage import Storage, open_storage

logger = logging.getLogger(__name__)
_ID = "run-id"


def own_remote(remote: str, run: Path, ranks: Ranks, *, resume: bool) -> None:
    """Collective; raises CheckpointError where `remote` is another run's, and of a new run also
    where nothing can be read or written there. Later that is told, and training goes on."""
    ranks.writer_does(lambda: _own(remote, run / "remote.json", resume=resume))


def _own(remote: str, record: Path, *, resume: bool) -> None:
    storage = open_storage(remote)
    try:
        there = storage.get(_ID).decode().strip() if storage.size(_ID) is not None else None
        ours = _remembered(record) if resume else None
        if not resume:
            _refuse_checkpoints(storage)
        elif there is not None and ours is not None and there != ours:
            raise CheckpointError(
                f"checkpoint.remote {remote} holds the checkpoints of another run; name this run's "
                "place, or a new one"
            )
        kept = (there if resume else None) or ours or secrets.token_hex(8)
        if kept != there:
            storage.put(_ID, kept.encode())
    except StorageError as error:
        if not resume:
            raise
        logger.warning("checkpoint.remote %s is not there now: %s", remote, error)
        return
    if kept != ours:
        record.parent.mkdir(parents=True, exist_ok=True)
        write_durably(record, json.dumps({"run_id": kept}).encode() + b"\n")


def _refuse_checkpoints(storage: Storage) -> None:
    listing = list_checkpoints(storage)
    if listing.committed or listing.damaged:
        number = len(listing.committed)
        raise CheckpointError(
            f"checkpoint.remote {storage.url} holds {number} checkpoint(s) already, and this is a "
            "new run; name a place of its own, or continue that run with --resume"
        )


def _remembered(record: Path) -> str | None:
    """None also where the record does not read: nothing depends on it but a refusal."""
    try:
        return str(json.loads(record.read_text())["run_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
