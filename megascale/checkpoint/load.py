"""Finding, checking and loading checkpoints, saved in any layout (MegaScale 4.4).

Invariant: of what a storage holds nothing is used before mark, manifest and hash vouched for it.
Hashes of data are checked as it is loaded, so that it is read once: `find_latest` looks at marks,
manifests and sizes, and a load that meets a damaged block raises DamagedError on all ranks, after
which an older checkpoint may be tried (`load_newest` does). `verify` reads all and loads nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist

from megascale.checkpoint.agree import Ranks
from megascale.checkpoint.manifest import (
    MARK,
    Manifest,
    OtherFormatError,
    list_checkpoints,
    read_manifest,
)
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.places import Location, Root, opened
from megascale.checkpoint.reading import (
    DamagedError,
    Files,
    Limits,
    PlanCache,
    RankPlan,
    Window,
    gather,
    lost_peers,
    read_pieces,
    wants_of,
)
from megascale.errors import CheckpointError

logger = logging.getLogger(__name__)
_PATIENCE_S = 300.0  # for a rank that says nothing; a storage that stalls is an error long before


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded from where.

    meta     the caller's of the save, with its `step`
    digests  of each kind of state when it was saved, for whoever compares them with what it has now
    """

    path: Location
    step: int
    meta: dict[str, Any]
    digests: dict[str, str]


@overload
def find_latest(root: Path, *, group: dist.ProcessGroup | None = None) -> Path | None: ...
@overload
def find_latest(root: Root, *, group: dist.ProcessGroup | None = None) -> Location | None: ...
def find_latest(root: Root, *, group: dist.ProcessGroup | None = None) -> Location | None:
    """The checkpoint of `root` that was committed last and looks whole, the same on all ranks.

    Interrupted ones, and those of which a file is missing or of another size, are skipped with a
    warning; None if none is left. One of another format is refused. No data is read.
    """
    ranks = Ranks(group)
    return next((path for path, _ in _whole_ones(root, ranks)), None)


def load_newest(
    root: Root,
    pieces: Sequence[Piece],
    *,
    group: dist.ProcessGroup | None = None,
    accept: Callable[[Location, dict[str, Any]], None] = lambda _path, _meta: None,
    plans: PlanCache | None = None,
) -> LoadedCheckpoint | None:
    """Load the one committed last; where it turns out to be damaged, the next older one.

    accept  raises CheckpointError for the meta of a checkpoint that is not to be loaded (another
            model): nothing older is tried then, nor where the storage fails
    Collective. None where there is no checkpoint that is whole; pieces may be half filled then.
    """
    ranks, plans = Ranks(group), plans or PlanCache()
    for path, files in _whole_ones(root, ranks):
        loaded = _loaded(path, files)
        accept(path, loaded.meta)
        try:
            with _peers_named(str(path), ranks):
                _load(files, pieces, ranks, plans)
        except DamagedError as error:
            _warn(ranks, f"skipping a corrupt checkpoint: {error}")
            continue
        return loaded
    return None


def load_checkpoint(
    path: Location,
    pieces: Iterable[Piece],
    *,
    group: dist.ProcessGroup | None = None,
    verified: bool = False,
    plans: PlanCache | None = None,
    patience_s: float = _PATIENCE_S,
) -> LoadedCheckpoint:
    """Fill the tensors of `pieces` in place, from whatever layout was saved. Collective.

    Values are converted where the piece's dtype is not the saved one (logged). Of each kind of
    state that is asked for (`master`, `exp_avg`, ...: the key up to its first slash), the ranks
    together must ask for every saved tensor: a model with fewer layers is another model.

    path        a folder or a URL (`s3://BUCKET/RUN/step-00000100`)
    group       gloo, used by nobody else meanwhile; None: a single process
    verified    `path` comes from `find_latest` just now: sizes need no second look
    plans       of earlier loads: one in the same layout is not planned again
    patience_s  for a rank that says nothing (one that still reads says so)

    Raises CheckpointError on all ranks: DamagedError where another checkpoint may be whole, else
    for another model, a storage that fails, a rank that is gone. Pieces may then be half filled.
    """
    ranks = Ranks(group)
    with _peers_named(str(path), ranks):
        files = _open(path, ranks)
        if not verified:
            _check_sizes(files, ranks)
        _load(files, list(pieces), ranks, plans or PlanCache(), patience_s)
    return _loaded(path, files)


def verify(path: Location, *, group: dist.ProcessGroup | None = None) -> Manifest:
    """Check mark, manifest, and size and hashes of each file; raises CheckpointError on all ranks.

    Reads everything; the files are dealt out over the ranks of `group`, largest first.
    """
    ranks = Ranks(group)
    files = _open(path, ranks)
    _check_sizes(files, ranks)
    saved = files.manifest.files
    by_size = sorted(range(len(files.names)), key=lambda n: (-saved[files.names[n]].num_bytes, n))
    gather(ranks, lambda: _hash(files, by_size[ranks.rank :: ranks.num_ranks]))
    return files.manifest


def read_meta(path: Location) -> dict[str, Any]:
    """The `meta` given to the save, with its `step`; trusts the mark, hashes no data file."""
    saved = read_manifest(path)
    return {**saved.meta, "step": saved.step}


def check_sizes(path: Location, *, group: dist.ProcessGroup | None = None) -> Files:
    """Check mark, manifest, and that each file is there in its size. Collective."""
    ranks = Ranks(group)
    files = _open(path, ranks)
    _check_sizes(files, ranks)
    return files


def _open(path: Location, ranks: Ranks) -> Files:
    storage, folder = opened(path)
    return Files(storage, folder, manifest_together(path, ranks))


def manifest_together(path: Location, ranks: Ranks) -> Manifest:
    """`read_manifest` by the writer, on all ranks; its errors too, OtherFormatError as such."""

    def read() -> tuple[Manifest | None, str]:
        try:
            return read_manifest(path), ""
        except OtherFormatError as error:
            return None, str(error)

    manifest, refusal = ranks.writer_does(read)
    if manifest is None:
        raise OtherFormatError(refusal)
    return manifest


def _loaded(path: Location, files: Files) -> LoadedCheckpoint:
    saved = files.manifest
    return LoadedCheckpoint(path, saved.step, {**saved.meta, "step": saved.step}, saved.digests)


def _whole_ones(root: Root, ranks: Ranks) -> Iterator[tuple[Location, Files]]:
    """Those that look whole, newest first; the others are told when their turn comes."""
    listing = ranks.writer_does(lambda: list_checkpoints(root))
    for path in listing.interrupted:
        _warn(ranks, f"skipping {path}: no commit mark, its save was interrupted")
    for path in listing.damaged:
        _warn(ranks, f"skipping {path}: {MARK} is missing or damaged; its data stays untouched")
    for path in listing.committed:
        try:
            files = _open(path, ranks)
            _check_sizes(files, ranks)
        except OtherFormatError:
            raise
        except CheckpointError as error:
            _warn(ranks, f"skipping a corrupt checkpoint: {error}")
            continue
        yield path, files


def _check_sizes(files: Files, ranks: Ranks) -> None:
    dealt = range(ranks.rank, len(files.names), ranks.num_ranks)
    gather(ranks, lambda: files.check_sizes(dealt))


def _hash(files: Files, numbers: Iterable[int]) -> None:
    for number in numbers:
        files.read_headers([number])
        blocks = files.manifest.files[files.names[number]].blocks
        sources = [files.block(number, index) for index in range(len(blocks))]
        window = Window(files.storage, sources, block_bytes=files.block_bytes)
        try:
            for _ in sources:
                window.release(window.next(_PATIENCE_S)[0])
        finally:
            window.close()


def _load(
    files: Files,
    pieces: Sequence[Piece],
    ranks: Ranks,
    plans: PlanCache,
    patience_s: float = _PATIENCE_S,
) -> None:
    limits = Limits(files.block_bytes, 4 * files.block_bytes)
    plan = plans.plan(files, wants_of(pieces), ranks, limits)
    _say_conversions(plan, pieces)
    read_pieces(files, plan, pieces, ranks, patience_s=patience_s)


def _say_conversions(plan: RankPlan, pieces: Sequence[Piece]) -> None:
    saved = plan.saved_dtypes()
    converted: Counter[tuple[torch.dtype, torch.dtype]] = Counter(
        (dtype, pieces[piece].tensor.dtype)
        for piece, dtype in saved.items()
        if dtype != pieces[piece].tensor.dtype
    )
    for (source, target), count in converted.items():
        logger.info("%d pieces are converted from %s to %s on loading", count, source, target)


@contextmanager
def _peers_named(where: str, ranks: Ranks) -> Iterator[None]:
    """A rank that dies while the load is planned closes gloo's connections under a collective,
    whose error does not say which one."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        # a timeout of gloo's own closes all connections: then nobody can be named
        lost = [] if "imed out" in reason else lost_peers(ranks)
        told = "; ".join(map(str, lost)) or "a rank is gone, or did not answer in time"
        raise CheckpointError(f"loading {where}: {told} ({reason})") from error


def _warn(ranks: Ranks, message: str) -> None:
    if ranks.is_writer:
        logger.warning(message)
