"""Where a path or URL leads: a checkpoint, a folder of checkpoints, a run that has one."""

from __future__ import annotations

from pathlib import Path

from megascale.checkpoint.load import find_latest
from megascale.checkpoint.manifest import MANIFEST, MARK, is_checkpoint_name, list_checkpoints
from megascale.checkpoint.places import Location, locate, name_of, opened, storage_of
from megascale.errors import CheckpointError
from megascale.storage import is_url

CHECKPOINTS = "checkpoints"  # of a run folder


def location(text: str) -> Location:
    return text if is_url(text) else Path(text)


def root_of(place: Location) -> Location:
    """The folder whose folders are checkpoints. Raises CheckpointError where there is none."""
    names = storage_of(place).names()
    if any(map(is_checkpoint_name, names)):
        return place
    inner = locate(place, CHECKPOINTS)
    if CHECKPOINTS in names and any(map(is_checkpoint_name, storage_of(inner).names())):
        return inner
    if is_checkpoint_name(name_of(place)) and {MARK, MANIFEST}.intersection(names):
        raise CheckpointError(f"{place} is one checkpoint; give the folder that it lies in")
    found = f"it holds {', '.join(names[:3])}..." if names else "it is empty or not there"
    raise CheckpointError(
        f"{place} holds no checkpoints ({found}); give a run folder, its {CHECKPOINTS}/, or the "
        "URL of such a folder (s3://BUCKET/RUN)"
    )


def checkpoints_at(place: Location) -> list[Location]:
    """`place` itself where it is a checkpoint, else all of its root that were committed: newest
    first, then those whose mark is lost or damaged. Raises CheckpointError where there is none."""
    if _is_checkpoint(place):
        return [place]
    root = root_of(place)
    listing = list_checkpoints(root)
    found = [*listing.committed, *listing.damaged]
    if not found:
        raise CheckpointError(_nothing_committed(root))
    return found


def newest_at(place: Location) -> Location:
    """`place` itself where it is a checkpoint, else the newest of its root that looks whole."""
    if _is_checkpoint(place):
        return place
    root = root_of(place)
    found = find_latest(root)
    if found is None:
        raise CheckpointError(_nothing_committed(root))
    return found


def _is_checkpoint(place: Location) -> bool:
    if not is_checkpoint_name(name_of(place)):
        return False
    storage, folder = opened(place)
    if not storage.names(folder):
        raise CheckpointError(f"no checkpoint at {place}: there is no such folder, or it is empty")
    return True


def _nothing_committed(root: Location) -> str:
    return (
        f"{root} holds no checkpoint that was committed whole; see what it holds: megascale "
        f"checkpoint ls {root}"
    )
