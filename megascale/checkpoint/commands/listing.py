"""`megascale checkpoint ls`: each checkpoint of a root and its state. Nothing is hashed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from megascale.checkpoint.load import check_sizes
from megascale.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MARK,
    list_checkpoints,
    name_order,
    read_mark,
)
from megascale.checkpoint.places import Location, name_of, opened, storage_of
from megascale.errors import CheckpointError
from megascale.storage import LocalFolder, Storage
from megascale.storage.remote import RemoteFolder

COMMITTED, INTERRUPTED, DAMAGED = "committed", "interrupted", "damaged"
NEWER, OLDER = "newer format", "older format"
_NUM_ASKING = 8  # an object store takes tens of milliseconds an answer


@dataclass(frozen=True)
class Listed:
    """number     of the save, counted over all of the root; None without a readable mark
    time       when the mark was written (ISO 8601, UTC), else when anything of it was
    num_bytes  of all its files as they lie there
    state      "committed": whole as far as sizes tell
    problem    what is wrong; "" where nothing is
    """

    path: str
    name: str
    step: int
    number: int | None
    time: str | None
    num_bytes: int
    num_files: int
    state: str
    problem: str

    def line(self) -> str:
        number = "-" if self.number is None else str(self.number)
        columns = f"{self.name:<17} {self.step:>9} {number:>6}  {self.time or '-':<20} "
        columns += f"{self.num_bytes:>19,} {self.num_files:>5}  {self.state}"
        return f"{columns}: {self.problem}" if self.problem else columns


HEADINGS = (
    f"{'name':<17} {'step':>9} {'number':>6}  {'time (UTC)':<20} {'bytes':>19} {'files':>5}  state"
)


def list_all(root: Location) -> list[Listed]:
    """Committed ones, newest first; then what else lies there, by name."""
    listing = list_checkpoints(root)
    places = [*listing.committed, *sorted(listing.damaged + listing.interrupted, key=name_order)]
    interrupted = set(map(name_of, listing.interrupted))
    storage_of(root)  # threads below share what is opened here
    with ThreadPoolExecutor(_NUM_ASKING) as pool:
        return list(pool.map(lambda place: _listed(place, interrupted), places))


def _listed(place: Location, interrupted: set[str]) -> Listed:
    storage, folder = opened(place)
    names = storage.names(folder)
    sizes = [storage.size(f"{folder}/{name}") or 0 for name in names]
    state, problem = _state(place, storage, folder, names)
    if folder in interrupted:
        state, problem = INTERRUPTED, ""
    return Listed(
        path=str(place),
        name=folder,
        step=name_order(place)[0],
        number=_number(storage, folder),
        time=next(_times(storage, folder, names), None),
        num_bytes=sum(sizes),
        num_files=len(names),
        state=state,
        problem=problem,
    )


def _state(place: Location, storage: Storage, folder: str, names: list[str]) -> tuple[str, str]:
    found = _format(storage, folder, names)
    if found is not None and found != FORMAT:
        which = NEWER if found > FORMAT else OLDER
        return which, f"format {found}, this version reads {FORMAT}"
    try:
        check_sizes(place)
    except CheckpointError as error:
        return DAMAGED, str(error).removeprefix(f"{place}: ")
    return COMMITTED, ""


def _format(storage: Storage, folder: str, names: list[str]) -> int | None:
    """What the manifest says, whether or not it can be trusted."""
    if MANIFEST not in names:
        return None
    try:
        return int(json.loads(storage.get(f"{folder}/{MANIFEST}"))["format"])
    except (ValueError, KeyError, TypeError):
        return None


def _number(storage: Storage, folder: str) -> int | None:
    try:
        return read_mark(storage, folder).number
    except CheckpointError:
        return None


def _times(storage: Storage, folder: str, names: list[str]) -> Iterator[str]:
    assert isinstance(storage, (LocalFolder, RemoteFolder)), storage
    for name in (MARK, *reversed(names)):
        modified_s = storage.modified_s(f"{folder}/{name}")
        if modified_s is not None:
            yield datetime.fromtimestamp(modified_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
