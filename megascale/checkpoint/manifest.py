"""One checkpoint as a directory, and what makes it trusted. No tensors, no processes here.

    root/step-00000100/__0_0.distcp ... .metadata   torch DCP's files
                       manifest.json                step, meta, size and SHA-256 of each file
                       COMMITTED                    the mark: save number, the manifest's SHA-256

Invariants:
1. A directory is never reused. Saving a step again makes `step-00000100.1`, then `.2`, ...
2. The mark is written last, by one writer, after everything else is durable; the manifest just
   before it. A directory without a valid mark is never loaded. Without a manifest too it is the
   leftover of an interrupted save; with one its data may be whole, so nothing here deletes it.
3. *Newest* means committed last (the save number in the mark), not the highest step: after a
   roll-back, or a resume from an older one, a restart must not return to the abandoned branch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megascale.checkpoint.durable import fsync_path, write_durably
from megascale.errors import CheckpointError
from megascale.storage import BLOCK_BYTES

MARK = "COMMITTED"
MANIFEST = "manifest.json"
_FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


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
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()

    @staticmethod
    def decode(data: bytes) -> Manifest:
        """Raises CheckpointError for another format, and for what is no manifest."""
        try:
            content = json.loads(data)
            if content["format"] != _FORMAT:
                raise CheckpointError(_other_format(content["format"]))
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
    is_older = isinstance(found, int) and found < _FORMAT
    which = "an older" if is_older else "a newer"
    remedy = "load it with" if is_older else "update megascale to"
    return (
        f"checkpoint format {found} of {which} megascale, this version reads {_FORMAT}; {remedy} "
        "the version that wrote it"
    )


class Listing(NamedTuple):
    """The checkpoint directories of a folder.

    committed    with a readable mark, newest first
    interrupted  neither mark nor manifest: leftovers, in name order
    damaged      the mark does not read, or is gone while the manifest is there; in name order
    """

    committed: list[Path]
    interrupted: list[Path]
    damaged: list[Path]


HASHED_BYTES = BLOCK_BYTES


def hash_file(
    path: Path, moved: Callable[[], None] = lambda: None, *, header_bytes: int = 0
) -> SavedFile:
    """`moved`: called for each block that was read."""
    blocks = []
    block = bytearray(HASHED_BYTES)
    with path.open("rb", buffering=0) as file:
        header = hashlib.sha256(file.read(header_bytes)).hexdigest()
        while num_bytes := file.readinto(block):
            blocks.append(hashlib.sha256(memoryview(block)[:num_bytes]).hexdigest())
            moved()
        return SavedFile(file.tell(), header_bytes, header, tuple(blocks))


def claim(root: Path, step: int) -> Path:
    """Make the directory of a new save of `step`; of two that claim at once, each gets its own."""
    root.mkdir(parents=True, exist_ok=True)
    for attempt in itertools.count():
        directory = root / (f"step-{step:08d}" + (f".{attempt}" if attempt else ""))
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        fsync_path(root)
        return directory
    raise AssertionError("unreachable: count() does not end")


def commit(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, then the mark. The files must be durable; their names become so here."""
    unlisted = {path.name for path in directory.iterdir()} - set(manifest.files)
    assert not unlisted, f"files that the manifest does not vouch for: {sorted(unlisted)}"
    for name, saved in manifest.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != saved.num_bytes:
            raise CheckpointError(
                f"{path} is not what its rank wrote, seen from the writer; a checkpoint folder "
                "must lie on storage that all nodes share"
            )
    data = manifest.encode()
    write_durably(directory / MANIFEST, data)
    committed = list_checkpoints(directory.parent).committed
    number = 1 + max((_read_mark(path)[0] for path in committed), default=0)
    mark = {"number": number, "manifest_sha256": hashlib.sha256(data).hexdigest()}
    write_durably(directory / MARK, json.dumps(mark).encode())


def discard(directory: Path) -> None:
    """Delete a checkpoint; mark and manifest go first, so that a kill leaves a leftover."""
    for name in (MARK, MANIFEST):
        (directory / name).unlink(missing_ok=True)
        fsync_path(directory)
    shutil.rmtree(directory)


def name_order(directory: Path) -> tuple[int, int]:
    """(step, attempt) of a checkpoint directory's name."""
    match = _NAME.fullmatch(directory.name)
    assert match, f"not a checkpoint directory: {directory}"
    return int(match[1]), int(match[2] or 0)


def list_checkpoints(root: Path) -> Listing:
    """What lies in `root`. No file is hashed."""
    if not root.is_dir():
        return Listing([], [], [])
    numbered: list[tuple[int, tuple[int, int], Path]] = []
    interrupted: list[Path] = []
    damaged: list[Path] = []
    for path in root.iterdir():
        if not (_NAME.fullmatch(path.name) and path.is_dir()):
            continue
        try:
            numbered.append((_read_mark(path)[0], name_order(path), path))
        except CheckpointError:
            kind = damaged if (path / MARK).exists() or (path / MANIFEST).exists() else interrupted
            kind.append(path)
    committed = [path for _, _, path in sorted(numbered, reverse=True)]
    return Listing(committed, sorted(interrupted, key=name_order), sorted(damaged, key=name_order))


def read_manifest(directory: Path) -> Manifest:
    """The manifest, if the mark is there and vouches for it."""
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint at {directory}: there is no such directory")
    _, expected = _read_mark(directory)
    try:
        data = (directory / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: {MANIFEST} is missing; use another one") from None
    if hashlib.sha256(data).hexdigest() != expected:
        raise CheckpointError(
            f"{directory}: {MANIFEST} was changed after the save; use another one"
        )
    return Manifest.decode(data)


def _read_mark(directory: Path) -> tuple[int, str]:
    """(save number, SHA-256 of the manifest)."""
    try:
        mark = json.loads((directory / MARK).read_bytes())
        return int(mark["number"]), str(mark["manifest_sha256"])
    except FileNotFoundError:
        why = (
            f"{MARK} is missing though {MANIFEST} is there; put it back from a copy, or"
            if (directory / MANIFEST).exists()
            else "its save was interrupted;"
        )
        raise CheckpointError(f"{directory} has no commit mark: {why} use another one") from None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(
            f"{directory}: the commit mark {MARK} is damaged; put it back from a copy, or use "
            "another one"
        ) from None
