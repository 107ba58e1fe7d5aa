"""One checkpoint as a folder of a storage, and what makes it trusted. No tensors, no processes.

    root/step-00000100/rank-00000.safetensors ...  one a rank that writes (`layout.py`)
                       manifest.json               step, meta, digests; sizes, hashes of the files
                       COMMITTED                   the mark: save number, the manifest's SHA-256

Invariants:
1. A folder is never reused. Saving a step again makes `step-00000100.1`, then `.2`, ...
2. The mark is written last, by one writer, after everything else is durable; the manifest just
   before it. A folder without a valid mark is never loaded. Without a manifest too it is the
   leftover of an interrupted save; with one its data may be whole, so nothing here deletes it.
3. *Newest* means committed last (the save number in the mark), not the highest step: after a
   roll-back, or a resume from an older one, a restart must not return to the abandoned branch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

from megascale.checkpoint.places import Location, Root, locate, name_of, opened, storage_of
from megascale.errors import CheckpointError, StorageError
from megascale.storage import Storage

MARK = "COMMITTED"
MANIFEST = "manifest.json"
FORMAT = 2
_NUM_ASKING = 8
Place = TypeVar("Place", bound=Location)
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


class OtherFormatError(CheckpointError):
    """Of an older or a newer version: whole, for all that this one knows. Whoever passes it over
    would go on from an older state, and delete it later."""


@dataclass(frozen=True)
class SavedFile:
    """What a file must look like to be trusted.

    num_bytes      all of it
    header_bytes   of the header, which says what lies where (`layout.py`)
    header_sha256  hex
    blocks         hex SHA-256 of each `BLOCK_BYTES` behind the header; the last may be shorter
    """

    num_bytes: int
    header_bytes: int
    header_sha256: str
    blocks: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """One for all of it."""
        return hashlib.sha256("".join((self.header_sha256, *self.blocks)).encode()).hexdigest()


@dataclass(frozen=True)
class Manifest:
    """What was saved.

    meta     the caller's (model configuration, consumed samples, seed, versions): JSON
    files    by their names in the checkpoint's folder
    digests  of the values of each kind of state, in hex (`digest.py`): whatever the layout, they
             are the same. Empty where nobody made them
    """

    step: int
    meta: dict[str, Any]
    files: dict[str, SavedFile]
    digests: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Raises OtherFormatError, and CheckpointError for what is no manifest."""
        try:
            content = json.loads(data)
            if content["format"] != FORMAT:
                raise OtherFormatError(_other_format(content["format"]))
            files = {
                str(name): SavedFile(
                    int(entry["num_bytes"]),
                    int(entry["header_bytes"]),
                    str(entry["header_sha256"]),
                    tuple(map(str, entry["blocks"])),
                )
                for name, entry in content["files"].items()
            }
            return Manifest(int(content["step"]), content["meta"], files, content["digests"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"no manifest of this version ({error!r})") from None


def _other_format(found: object) -> str:
    is_older = isinstance(found, int) and found < FORMAT
    which = "an older" if is_older else "a newer"
    remedy = "load it with" if is_older else "update megascale to"
    return (
        f"checkpoint format {found} of {which} megascale, this version reads {FORMAT}; {remedy} "
        "the version that wrote it"
    )


class Listing(NamedTuple, Generic[Place]):
    """The checkpoints of a root.

    committed    with a readable mark, newest first
    interrupted  neither mark nor manifest: leftovers, in name order
    damaged      the mark does not read, or is gone while the manifest is there; in name order
    """

    committed: list[Place]
    interrupted: list[Place]
    damaged: list[Place]


class Mark(NamedTuple):
    """number           of the save, counted over all saves of a root
    manifest_sha256  hex
    """

    number: int
    manifest_sha256: str


def is_checkpoint_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def file_name(rank: int) -> str:
    """Of what `rank` of the saving group writes."""
    return f"rank-{rank:05d}.safetensors"


def claim(storage: Storage, step: int) -> str:
    """Make the folder of a new save of `step`; of two that claim at once, each gets its own."""
    for attempt in itertools.count():
        folder = f"step-{step:08d}" + (f".{attempt}" if attempt else "")
        if storage.claim(folder):
            return folder
    raise AssertionError("unreachable: count() does not end")


def commit(storage: Storage, folder: str, manifest: Manifest, *, above: int = 0) -> None:
    """Write the manifest, then the mark: one writer, once all files are durable. The save's number
    is greater than all here, and than `above`: what the run came from may lie elsewhere."""
    unlisted = set(storage.names(folder)) - set(manifest.files)
    assert not unlisted, f"files that the manifest does not vouch for: {sorted(unlisted)}"
    for name, num_bytes in _sizes(storage, folder, list(manifest.files)):
        if num_bytes != manifest.files[name].num_bytes:
            raise CheckpointError(
                f"{storage.url}: {folder}/{name} is not what its rank wrote, seen from the writer "
                f"({num_bytes} bytes, {manifest.files[name].num_bytes} were written); checkpoints "
                "must lie on storage that all nodes share"
            )
    data = manifest.encode()
    storage.put(f"{folder}/{MANIFEST}", data)
    numbers = (mark.number for mark in _marks(storage).values() if mark)
    number = 1 + max(above, max(numbers, default=0))
    mark = Mark(number, hashlib.sha256(data).hexdigest())
    storage.put(f"{folder}/{MARK}", json.dumps(mark._asdict()).encode())


def discard(storage: Storage, folder: str) -> None:
    """Delete a checkpoint. Killed after the manifest went, it is a checkpoint that does not load
    and is deleted with the next rotation; after the mark went, a leftover."""
    for name in (MANIFEST, MARK, ""):
        storage.remove(f"{folder}/{name}" if name else folder)


def name_order(checkpoint: Location) -> tuple[int, int]:
    """(step, attempt) of a checkpoint's name."""
    match = _NAME.fullmatch(name_of(checkpoint))
    assert match, f"not a checkpoint: {checkpoint}"
    return int(match[1]), int(match[2] or 0)


@overload
def list_checkpoints(root: Path) -> Listing[Path]: ...
@overload
def list_checkpoints(root: Root) -> Listing[Location]: ...
def list_checkpoints(root: Root) -> Listing[Any]:
    """What lies in `root`. No file is hashed."""
    listing: Listing[Any] = Listing([], [], [])
    numbered: list[tuple[int, tuple[int, int], Location]] = []
    storage = storage_of(root)
    for folder, mark in _marks(storage).items():
        place = locate(root, folder)
        if mark:
            numbered.append((mark.number, name_order(folder), place))
        elif {MARK, MANIFEST}.intersection(storage.names(folder)):
            listing.damaged.append(place)
        elif storage.size(folder) is None:  # no file of that name
            listing.interrupted.append(place)
    listing.committed.extend(place for _, _, place in sorted(numbered, reverse=True))
    listing.interrupted.sort(key=name_order)
    listing.damaged.sort(key=name_order)
    return listing


def read_manifest(checkpoint: Location) -> Manifest:
    """The manifest, if the mark is there and vouches for it."""
    storage, folder = opened(checkpoint)
    names = storage.names(folder)
    if not names and folder not in storage.names():
        raise CheckpointError(f"no checkpoint at {checkpoint}: there is no such directory")
    mark = read_mark(storage, folder)
    if MANIFEST not in names:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is missing; use another one")
    data = storage.get(f"{folder}/{MANIFEST}")
    if hashlib.sha256(data).hexdigest() != mark.manifest_sha256:
        raise CheckpointError(
            f"{checkpoint}: {MANIFEST} was changed after the save; use another one"
        )
    try:
        return Manifest.decode(data)
    except CheckpointError as error:
        raise type(error)(f"{checkpoint}: {error}") from None


def read_mark(storage: Storage, folder: str) -> Mark:
    """The mark of a committed checkpoint."""
    where = locate(storage, folder)
    names = storage.names(folder)
    if MARK not in names:
        why = (
            f"{MARK} is missing though {MANIFEST} is there; put it back from a copy, or"
            if MANIFEST in names
            else "its save was interrupted;"
        )
        raise CheckpointError(f"{where} has no commit mark: {why} use another one")
    try:
        mark = json.loads(storage.get(f"{folder}/{MARK}"))
        return Mark(int(mark["number"]), str(mark["manifest_sha256"]))
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{where}: the commit mark {MARK} is damaged; put it back from a copy, or use "
            "another one"
        ) from None


def _marks(storage: Storage) -> dict[str, Mark | None]:
    """Of all that has a checkpoint's name; None where no mark reads. A storage that is gone, or
    refuses, is an error here, and not a checkpoint that is damaged."""
    marks: dict[str, Mark | None] = {}
    for folder in filter(_NAME.fullmatch, storage.names()):
        try:
            marks[folder] = read_mark(storage, folder)
        except StorageError:
            raise
        except CheckpointError:
            marks[folder] = None
    return marks


def _sizes(storage: Storage, folder: str, names: list[str]) -> Iterable[tuple[str, int | None]]:
    """Asked for several at a time: an object store takes tens of milliseconds for each."""
    with ThreadPoolExecutor(_NUM_ASKING) as pool:
        sizes = pool.map(lambda name: storage.size(f"{folder}/{name}"), names)
        return list(zip(names, sizes, strict=True))
