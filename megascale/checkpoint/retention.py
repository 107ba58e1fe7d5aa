"""Which checkpoints stay: the last k, and never fewer than one that is known to be good.

The bug of the field is to rotate out the last healthy checkpoint while newer ones are corrupt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from megascale.checkpoint.load import verify
from megascale.checkpoint.manifest import discard, list_checkpoints, name_order
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)


def apply_retention(
    root: Path, keep_latest_k: int, *, protect: Iterable[Path] = (), known_good: Path | None = None
) -> list[Path]:
    """Delete what is no longer needed; returns what was deleted. For one process, between saves.

    Kept: the `keep_latest_k` committed last; what is in `protect` (the one loaded from); if none of
    these verifies, the newest older one that does. `known_good` (the one saved just now) spares
    hashing it again. Leftovers of interrupted saves go if their name is older than the newest
    committed one's; those with a manifest but no readable mark stay, their data may be whole. What
    cannot be deleted is reported and left.
    """
    assert keep_latest_k >= 1, keep_latest_k
    committed, interrupted, _ = list_checkpoints(root)
    if not committed:
        return []
    protected = {path.resolve() for path in protect}
    kept = [
        path
        for position, path in enumerate(committed)
        if position < keep_latest_k or path.resolve() in protected
    ]
    doomed = [path for path in committed if path not in kept]
    if doomed and not any(_is_good(path, known_good) for path in kept):
        good = next((path for path in doomed if _is_good(path, known_good)), None)
        logger.warning("none of the last %d checkpoints verifies; keeping %s", keep_latest_k, good)
        doomed = [path for path in doomed if path != good] if good else []
    doomed += [path for path in interrupted if name_order(path) < name_order(committed[0])]
    return [path for path in doomed if _delete(path)]


def _is_good(path: Path, known_good: Path | None) -> bool:
    if known_good is not None and path.resolve() == known_good.resolve():
        return True
    try:
        verify(path)
    except CheckpointError as error:
        logger.warning("a checkpoint does not verify: %s", error)
        return False
    return True


def _delete(path: Path) -> bool:
    try:
        discard(path)
    except OSError as error:
        logger.warning("could not delete %s: %s", path, error)
        return False
    logger.debug("deleted %s", path)  # with every save: who calls says it once
    return True
