"""Finding, checking and loading checkpoints, saved in any layout.

Invariant: no byte is unpickled before the mark, the manifest and all hashes were checked. The
hashing is spread over the ranks, each file by one; then each rank reads only the chunks that
intersect its pieces. `dcp.load` is not used because it gathers every rank's read plan at one rank:
reading needs no global plan, only the agreement that all ranks succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.manifest import (
    MARK,
    Manifest,
    hash_file,
    list_checkpoints,
    read_manifest,
)
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.planner import PieceLoadPlanner
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)


def find_latest(root: Path, *, group: dist.ProcessGroup | None = None) -> Path | None:
    """The checkpoint of `root` that was committed last and verifies, the same on all ranks.

    Interrupted and corrupt ones are skipped with a warning; None if none is left.
    """
    ranks = Ranks(group)
    listing = ranks.writer_does(lambda: list_checkpoints(root))
    for path in listing.interrupted:
        _warn(ranks, f"skipping {path}: no commit mark, its save was interrupted")
    for path in listing.damaged:
        _warn(ranks, f"skipping {path}: {MARK} is missing or damaged; its data stays untouched")
    for path in listing.committed:
        try:
            verify(path, group=group)
        except CheckpointError as error:
            _warn(ranks, f"skipping a corrupt checkpoint: {error}")
            continue
        return path
    return None


def verify(path: Path, *, group: dist.ProcessGroup | None = None) -> Manifest:
    """Check mark, manifest, and size and SHA-256 of each file; raises CheckpointError on all ranks.

    The files are dealt out over the ranks of `group`, largest first. Nothing is unpickled.
    """
    ranks = Ranks(group)
    saved = ranks.writer_does(lambda: read_manifest(path))
    by_size = sorted(saved.files, key=lambda name: (-saved.files[name].num_bytes, name))
    ranks.gather(lambda: _check_files(path, saved, by_size[ranks.rank :: ranks.num_ranks]))
    return saved


def read_meta(path: Path) -> dict[str, Any]:
    """The `meta` given to the save, with its `step`; trusts the mark, hashes no data file."""
    saved = read_manifest(path)
    return {**saved.meta, "step": saved.step}


def load_checkpoint(
    path: Path,
    pieces: Iterable[Piece],
    *,
    group: dist.ProcessGroup | None = None,
    verified: bool = False,
) -> None:
    """Fill the tensors of `pieces` in place, from whatever layout was saved. Collective.

    Values are converted where the piece's dtype is not the saved one (logged). Of each kind of
    state that is asked for (`master`, `exp_avg`, ...: the key up to its first slash), the ranks
    together must ask for every saved tensor: a model with fewer layers is another model.
    `verified`: `path` comes from `find_latest` or `verify` just now, do not hash again.
    Raises CheckpointError on all ranks; the pieces may then be half filled.
    """
    ranks = Ranks(group)
    if not verified:
        verify(path, group=group)
    planner, reader = PieceLoadPlanner(pieces), FileSystemReader(path)
    asked = reduce(or_, ranks.gather(lambda: _plan(reader, planner)))
    _check_all_asked(path, planner.saved_keys, asked)
    ranks.gather(lambda: _read(reader, planner))


def _plan(reader: FileSystemReader, planner: PieceLoadPlanner) -> int:
    """Plan this rank's reads; returns which saved keys it asks for, bit i the i-th.

    Bits, since all ranks exchange them: a thousand keys are 125 bytes.
    """
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    planner.set_up_planner({}, metadata)
    return sum(1 << i for i, key in enumerate(planner.saved_keys) if key in planner.asked_keys)


def _read(reader: FileSystemReader, planner: PieceLoadPlanner) -> None:
    reader.read_data(planner.create_local_plan(), planner).wait()


def _check_all_asked(path: Path, saved_keys: list[str], asked: int) -> None:
    left = [key for i, key in enumerate(saved_keys) if not asked >> i & 1]
    kinds = {key.split("/")[0] for i, key in enumerate(saved_keys) if asked >> i & 1}
    left = [key for key in left if key.split("/")[0] in kinds]
    if left:
        more = f" and {len(left) - 1} tensors more" if len(left) > 1 else ""
        raise CheckpointError(
            f"a checkpoint of another model: {path} also holds {left[0]!r}{more}, for which this "
            "model has no place; use the model configuration that it was saved with"
        )


def _check_files(path: Path, saved: Manifest, names: list[str]) -> None:
    for name in names:
        expected = saved.files[name]
        try:
            got = hash_file(path / name)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: {name} is missing; use another checkpoint") from None
        if got.num_bytes != expected.num_bytes:
            raise CheckpointError(
                f"{path}: {name} has {got.num_bytes:,} bytes, {expected.num_bytes:,} were saved; "
                "use another checkpoint"
            )
        if got.sha256 != expected.sha256:
            raise CheckpointError(
                f"{path}: {name} has SHA-256 {got.sha256[:12]}..., {expected.sha256[:12]}... was "
                "saved (its bytes were changed); use another checkpoint"
            )


def _warn(ranks: Ranks, message: str) -> None:
    if ranks.is_writer:
        logger.warning(message)
