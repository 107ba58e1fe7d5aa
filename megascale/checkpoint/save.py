"""Saving in two stages (MegaScale 4.4): take a snapshot, then write and commit it.

Stage 1 (`take_snapshot`) says what is saved; stage 2 (`write_snapshot`) checks the space, claims a
directory, writes torch DCP files, hashes them and commits. `save_checkpoint` runs both at once over
the live tensors; stage 2 needs nothing but the snapshot and a group that nobody else uses
meanwhile, so it can also run behind training over a copy.

Invariant: the mark is written only after every rank's files are durable, hashed, and seen by the
writer. When a save fails, all ranks raise, its directory is removed (a killed one stays behind
unmarked), and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megascale.checkpoint import manifest
from megascale.checkpoint.agree import Ranks, enclosed, explain, summarize
from megascale.checkpoint.manifest import Manifest, SavedFile
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.planner import PieceSavePlanner
from megascale.errors import CheckpointError

# A chunk's zip header and its entry in `.metadata` took 1.5 KiB with torch 2.13.
_OVERHEAD_BYTES_PER_PIECE = 2048


@dataclass(frozen=True)
class Snapshot:
    """What this rank contributes to the checkpoint of `step`; `meta` counts on the writer only."""

    step: int
    pieces: tuple[Piece, ...]
    meta: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """An upper estimate of what its files take."""
        return sum(piece.num_bytes + _OVERHEAD_BYTES_PER_PIECE for piece in self.pieces)


def save_checkpoint(
    root: Path,
    step: int,
    pieces: Iterable[Piece],
    meta: dict[str, Any],
    *,
    group: dist.ProcessGroup | None = None,
    moved: Callable[[], None] = lambda: None,
) -> Path:
    """Save and commit; returns the directory on every rank of `group` (None: a single process).

    Each rank passes the pieces that it writes; all together tile each key exactly once. Rank 0 of
    `group` is the only one that commits. `meta` is JSON. Raises CheckpointError on all ranks.
    `moved` is called whenever this rank has a tensor or a block more behind it, from any thread.
    """
    return write_snapshot(root, take_snapshot(step, pieces, meta), group=group, moved=moved)


def take_snapshot(step: int, pieces: Iterable[Piece], meta: dict[str, Any]) -> Snapshot:
    """Stage 1: nothing is copied, so the tensors must not change until stage 2 has ended."""
    json.dumps(meta)  # what cannot be written is refused here, where the caller's stack shows it
    return Snapshot(step, tuple(pieces), meta)


def write_snapshot(
    root: Path,
    snapshot: Snapshot,
    *,
    group: dist.ProcessGroup | None = None,
    moved: Callable[[], None] = lambda: None,
) -> Path:
    """Stage 2: write, hash and commit. Collective over `group`."""
    moved()  # from here on this save tells
    ranks = Ranks(group)
    num_bytes = sum(ranks.gather(lambda: snapshot.num_bytes))
    directory = ranks.writer_does(lambda: _claim_with_space(root, snapshot.step, num_bytes))
    try:
        _write_files(directory, snapshot.pieces, ranks, moved)
        files = _merge(ranks.gather(lambda: _hash_own_files(directory, ranks, moved)))
        ranks.writer_does(
            lambda: manifest.commit(directory, Manifest(snapshot.step, snapshot.meta, files))
        )
    except CheckpointError:  # raised on all ranks alike, after each has ended its writing
        if ranks.is_writer:
            with contextlib.suppress(OSError):  # what cannot be removed is left without a mark
                manifest.discard(directory)
        raise
    return directory


def _claim_with_space(root: Path, step: int, num_bytes: int) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(root).free
    if num_bytes > free_bytes:
        raise CheckpointError(
            f"the checkpoint of step {step} needs about {num_bytes:,} bytes, {root} has "
            f"{free_bytes:,} free; free space or lower checkpoint.keep_latest_k. Nothing was "
            "written, older checkpoints are untouched, training can go on"
        )
    return manifest.claim(root, step)


class _Writer(FileSystemWriter):
    """torch's writer, whose error names the full disk.

    torch.save hides it behind a RuntimeError of its own, and what stands behind an error is lost
    on the way to the other ranks. What follows the writing of the own data is a wait for theirs,
    until `waiting` is left.
    """

    def __init__(self, directory: Path, waiting: contextlib.ExitStack) -> None:
        super().__init__(directory, overwrite=False)
        self._waiting = waiting

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(explain(error)) from error
        self._waiting.enter_context(enclosed())
        return written


def _write_files(
    directory: Path, pieces: tuple[Piece, ...], ranks: Ranks, moved: Callable[[], None]
) -> None:
    try:
        with warnings.catch_warnings(), contextlib.ExitStack() as waiting:
            # One process without a group is what we ask for, not an oversight.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                {},
                storage_writer=_Writer(directory, waiting),
                planner=PieceSavePlanner(pieces, moved),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as failed:
        failures = {rank: explain(error) for rank, (error, _) in failed.failures.items()}
        raise CheckpointError(summarize(failures, ranks.num_ranks)) from failed


def _hash_own_files(
    directory: Path, ranks: Ranks, moved: Callable[[], None]
) -> dict[str, SavedFile]:
    """Read back what this rank wrote (DCP's `__<rank>_*`); the writer takes all other files."""
    names = [path.name for path in directory.glob(f"__{ranks.rank}_*")]
    if ranks.is_writer:
        names += [path.name for path in directory.iterdir() if not path.name.startswith("__")]
    return {name: manifest.hash_file(directory / name, moved) for name in names}


def _merge(parts: list[dict[str, SavedFile]]) -> dict[str, SavedFile]:
    return {name: saved for part in parts for name, saved in sorted(part.items())}
