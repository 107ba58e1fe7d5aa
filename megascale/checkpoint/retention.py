"""Which checkpoints stay: the last k, and never fewer than one that is known to be good.

The bug of the field is to rotate out the last healthy checkpoint while newer ones are corrupt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

from megascale.checkpoint.load import verify
from megascale.checkpoint.manifest import discard, list_checkpoints, name_order
from megascale.checkpoint.places import Location, Root, is_same, opened
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)


@overload
def apply_retention(
    root: Path, keep_latest_k: int, *, protect: Iterable[Path] = (), known_good: Path | None = None
) -> list[Path]: ...
@overload
def apply_retention(
    root: Root,
    keep_latest_k: int,
    *,
    protect: Iterable[Location] = (),
    known_good: Location | None = None,
) -> list[Location]: ...
def apply_retention(
    root: Root,
    keep_latest_k: int,
    *,
    protect: Iterable[Location] = (),
    known_good: Location | None = None,
) -> list[Any]:
    """Delete what is no longer needed; returns what was deleted. For one process, between saves.

    Kept: the `keep_latest_k` committed last; what is in `protect` (the one loaded from); if none of
    these verifies, the newest older one that does. `known_good` (the one saved just now) spares
    hashing it again. Leftovers of interrupted saves go if their name is older than the newest
    committed one's; those with a manifest but no readable mark stay, their data may be whole. What
    cannot be deleted is reported and left.
    """
    doomed = doomed_checkpoints(root, keep_latest_k, protect=protect, known_good=known_good)
    return [path for path in doomed if _delete(path)]


def doomed_checkpoints(
    root: Root,
    keep_latest_k: int,
    *,
    protect: Iterable[Location] = (),
    known_good: Location | None = None,
) -> list[Location]:
    """What `apply_retention` would delete."""
    assert keep_latest_k >= 1, keep_latest_k
    committed, interrupted, _ = list_checkpoints(root)
    if not committed:
        return []
    protected = list(protect)
    kept = [
        path
        for position, path in enumerate(committed)
        if position < keep_latest_k or any(is_same(path, other) for other in protected)
    ]
    doomed = [path for path in committed if path not in kept]
    if doomed and not any(_is_good(path, known_good) for path in kept):
        good = next((path for path in doomed if _is_good(path, known_good)), None)
        logger.warning("none of the last %d checkpoints verifies; keeping %s", keep_latest_k, good)
        doomed = [path for path in doomed if path != good] if good else []
    doomed += [path for path in interrupted if name_order(path) < name_order(committed[0])]
    return doomed


def _is_good(path: Location, known_good: Location | None) -> bool:
    if known_good is not None and is_same(path, known_good):
        return True
    try:
        verify(path)
    except CheckpointError as error:
        logger.warning("a checkpoint does not verify: %s", error)
        return False
    return True


def _delete(path: Location) -> bool:
    try:
        discard(*opened(path))
    except (OSError, CheckpointError) as error:
        logger.warning("could not delete %s: %s", path, error)
        return False
    logger.debug("deleted %s", path)  # with every save: who calls says it once
    return True
