"""Writing and committing a checkpoint: each rank a file, then one writer the mark (MegaScale 4.4).

`save_checkpoint` writes live tensors and returns when the checkpoint is committed; `behind.py` does
the same from host memory, behind training. `commit_together` is what both do, whoever moves the
bytes.

Invariant: the mark is written only after every rank's file is durable, hashed on its way, and seen
by the writer. When a save fails, all ranks raise, its folder is removed (a killed one stays behind
unmarked), and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist

from megascale.checkpoint import manifest
from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.digest import Digests, added, as_hex
from megascale.checkpoint.layout import Entry, encode_header
from megascale.checkpoint.manifest import Manifest, SavedFile
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.places import Location, Root, locate, storage_of
from megascale.checkpoint.stream import stream_blocks
from megascale.checkpoint.tiling import Tiling, arrange
from megascale.errors import CheckpointError
from megascale.storage import Storage

# Of this process's saves: ranks compare it before they trust it, so one is enough for all groups.
_TILING = Tiling()


@overload
def save_checkpoint(
    root: Path,
    step: int,
    pieces: Iterable[Piece],
    meta: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    digests: Digests | None = None,
    above: int = 0,
    moved: Callable[[], None] = lambda: None,
) -> Path: ...
@overload
def save_checkpoint(
    root: Root,
    step: int,
    pieces: Iterable[Piece],
    meta: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    digests: Digests | None = None,
    above: int = 0,
    moved: Callable[[], None] = lambda: None,
) -> Location: ...
def save_checkpoint(
    root: Root,
    step: int,
    pieces: Iterable[Piece],
    meta: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    digests: Digests | None = None,
    above: int = 0,
    moved: Callable[[], None] = lambda: None,
) -> Location:
    """Save and commit; returns the checkpoint on every rank of `group` (None: a single process).

    Each rank passes the pieces that it writes; all together tile each key exactly once. Rank 0 of
    `group` is the only one that commits. `meta` is JSON. Raises CheckpointError on all ranks.
    `digests`: of this rank's pieces. `above`: see `manifest.commit`. `moved` is called whenever
    this rank has a block more behind it, from any thread. Host memory: a few blocks.
    """
    json.dumps(meta)  # what cannot be written is refused here, where the caller's stack shows it
    moved()  # from here on this save tells
    storage, ranks = storage_of(root), Ranks(group)
    ordered, entries = arrange(pieces)
    state = State(step, meta, tuple(entries), lambda: digests or {})

    def write(name: str, header: bytes) -> SavedFile:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the streams that make the tensors are not known here
        hashes: list[str] = []
        blocks = stream_blocks([piece.tensor for piece in ordered], hashes)
        parts = itertools.chain([memoryview(header)], blocks)
        storage.write(name, parts, lambda _: moved())
        return SavedFile(
            len(header) + entries[-1].stop,
            len(header),
            hashlib.sha256(header).hexdigest(),
            tuple(hashes),
        )

    return locate(root, commit_together(storage, state, ranks, _TILING, write, above=above))


@dataclass(frozen=True)
class State:
    """What this rank contributes to the checkpoint of `step`.

    meta     counts on the writer only
    entries  of its file, in order
    digests  asked for once the values are there: they may be on their way
    """

    step: int
    meta: dict[str, Any]
    entries: tuple[Entry, ...]
    digests: Callable[[], Digests]


def commit_together(
    storage: Storage,
    state: State,
    ranks: Ranks,
    tiling: Tiling,
    write: Callable[[str, bytes], SavedFile],
    *,
    fence: Callable[[], None] = lambda: None,
    above: int = 0,
) -> str:
    """Agree, claim a folder, have each rank `write(name, header)` its file, commit after
    `fence` with a number above `above`. Collective; returns the folder on all ranks, or raises
    CheckpointError on all."""
    tiling.agree(state.entries, ranks)
    headers: list[bytes] = []  # of this rank
    num_bytes = sum(ranks.gather(lambda: _make_header(state.entries, headers)))
    folder = ranks.writer_does(lambda: _claim_with_space(storage, state.step, num_bytes))
    try:
        parts = ranks.gather_at_writer(lambda: _write_own(state, headers[0], folder, ranks, write))
        ranks.writer_does(lambda: _commit(storage, folder, state, parts, fence, above))
    except CheckpointError:  # raised on all ranks alike, after each has ended its writing
        if ranks.is_writer:
            # What cannot be removed is left without a mark.
            with contextlib.suppress(OSError, CheckpointError):
                manifest.discard(storage, folder)
        raise
    return folder


_Part = tuple[dict[str, SavedFile], Digests]


def _write_own(
    state: State,
    header: bytes,
    folder: str,
    ranks: Ranks,
    write: Callable[[str, bytes], SavedFile],
) -> _Part:
    """The file of this rank, if it has values."""
    if not state.entries:
        return {}, state.digests()
    name = manifest.file_name(ranks.rank)
    return {name: write(f"{folder}/{name}", header)}, state.digests()


def _commit(
    storage: Storage,
    folder: str,
    state: State,
    parts: Sequence[_Part],
    fence: Callable[[], None],
    above: int,
) -> None:
    files = {name: saved for own, _ in parts for name, saved in own.items()}
    digests = as_hex(added(own for _, own in parts))
    fence()
    whole = Manifest(state.step, state.meta, files, digests)
    manifest.commit(storage, folder, whole, above=above)


def _make_header(entries: tuple[Entry, ...], headers: list[bytes]) -> int:
    """Appends it; returns the bytes of the whole file."""
    if not entries:
        headers.append(b"")
        return 0
    try:
        headers.append(encode_header(entries))
    except KeyError as error:
        raise CheckpointError(
            f"a tensor of {error} cannot be saved; use float64, float32, bfloat16, float16, int64, "
            "int32 or uint8"
        ) from None
    return len(headers[0]) + entries[-1].stop


def _claim_with_space(storage: Storage, step: int, num_bytes: int) -> str:
    free_bytes = storage.free_bytes()
    if free_bytes is not None and num_bytes > free_bytes:
        raise CheckpointError(
            f"the checkpoint of step {step} needs {num_bytes:,} bytes, {storage.url} has "
            f"{free_bytes:,} free; free space or lower checkpoint.keep_latest_k. Nothing was "
            "written, older checkpoints are untouched, training can go on"
        )
    return manifest.claim(storage, step)
