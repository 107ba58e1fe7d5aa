"""torch DCP's planners for pieces: what a rank writes, and what it reads for what it wants.

DCP stores rectangles ("chunks") of named tensors and finds them again by (name, offset). A piece is
such a chunk already, so saving is a translation and loading is box intersection. Files written so
are plain DCP checkpoints, which `torch.distributed.checkpoint.load` reads as well.
"""

from __future__ import annotations

import difflib
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megascale.checkpoint.pieces import Piece, check_tiling
from megascale.errors import CheckpointError
from megascale.shards import Box

logger = logging.getLogger(__name__)


class PieceSavePlanner(SavePlanner):
    """Writes `pieces`; the coordinator refuses what does not tile. `moved`: called for each."""

    def __init__(self, pieces: Iterable[Piece], moved: Callable[[], None]) -> None:
        self._moved = moved
        self._pieces = list(pieces)
        self._tensors = {_index(piece.key, piece.box): piece.tensor for piece in self._pieces}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to do: the pieces are the state."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(piece) for piece in self._pieces])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in all_plans for item in plan.items):
            data = item.tensor_data
            assert data is not None, item
            key = item.index.fqn
            entry = tensors.setdefault(key, TensorStorageMetadata(data.properties, data.size, []))
            if (entry.size, entry.properties.dtype) != (data.size, data.properties.dtype):
                raise CheckpointError(
                    f"{key}: ranks disagree, {tuple(entry.size)} {entry.properties.dtype} and "
                    f"{tuple(data.size)} {data.properties.dtype}; they must run one model"
                )
            entry.chunks.append(data.chunk)
        for key, entry in tensors.items():
            check_tiling(key, tuple(entry.size), [_box(chunk) for chunk in entry.chunks])
        return all_plans, Metadata(dict(tensors))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        self._moved()
        return self._tensors[write_item.index].detach()


@dataclass(frozen=True)
class _Copy:
    """A region of a saved chunk goes to a region of a piece."""

    source: Box
    target: Tensor


class PieceLoadPlanner(LoadPlanner):
    """Fills `pieces` in place, converting the saved dtype to the piece's where they differ.

    A saved chunk that several pieces need (another data-parallel cut) is read once, into a
    temporary tensor, and copied from there.
    """

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = list(pieces)
        self.asked_keys = {piece.key for piece in self._pieces}
        self.saved_keys: list[str] = []  # sorted; known once planned
        self._copies: dict[MetadataIndex, tuple[Box, torch.dtype, list[_Copy]]] = {}

    def set_up_planner(
        self,
        state_dict: Any,  # noqa: ARG002 (the pieces are the state)
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002 (each rank plans for itself)
    ) -> None:
        assert metadata is not None
        self.saved_keys = sorted(metadata.state_dict_metadata)
        converted: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
        chunks: dict[str, dict[Box, None]] = {}
        for piece in self._pieces:
            saved = _saved_tensor(metadata, piece)
            if piece.key not in chunks:
                chunks[piece.key] = dict.fromkeys(_box(chunk) for chunk in saved.chunks)
            self._plan_piece(piece, saved.properties.dtype, chunks[piece.key])
            if saved.properties.dtype != piece.tensor.dtype:
                converted[saved.properties.dtype, piece.tensor.dtype] += 1
        for (source, target), count in converted.items():
            logger.info("%d pieces are converted from %s to %s on loading", count, source, target)

    def _plan_piece(self, piece: Piece, dtype: torch.dtype, chunks: dict[Box, None]) -> None:
        target = piece.tensor.detach()
        # Chunks tile the tensor, so one equal to the piece is all it needs: a resume in the same
        # layout compares no boxes.
        for chunk in [piece.box] if piece.box in chunks else chunks:
            common = chunk.intersect(piece.box)
            if common is None:
                continue
            copy = _Copy(_relative(common, chunk), _narrow(target, _relative(common, piece.box)))
            read = self._copies.setdefault(_index(piece.key, chunk), (chunk, dtype, []))
            read[2].append(copy)

    def create_local_plan(self) -> LoadPlan:
        items = []
        for index, (chunk, _, copies) in self._copies.items():
            whole = Box((0,) * len(chunk.shape), chunk.shape)
            region = copies[0].source if len(copies) == 1 else whole
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=index,
                    dest_offsets=torch.Size(whole.offset),
                    storage_index=index,
                    storage_offsets=torch.Size(region.offset),
                    lengths=torch.Size(region.shape),
                )
            )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"only tensors are planned, got {read_item}, {value}")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        chunk, dtype, copies = self._copies[read_item.storage_index]
        return copies[0].target if len(copies) == 1 else torch.empty(chunk.shape, dtype=dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        copies = self._copies[read_item.storage_index][2]
        if len(copies) > 1:
            for copy in copies:
                copy.target.copy_(_narrow(tensor, copy.source))


def _saved_tensor(metadata: Metadata, piece: Piece) -> TensorStorageMetadata:
    """The saved tensor of the piece's key; another model's is refused."""
    saved = metadata.state_dict_metadata.get(piece.key)
    if not isinstance(saved, TensorStorageMetadata):
        near = difflib.get_close_matches(piece.key, metadata.state_dict_metadata, n=1)
        raise CheckpointError(
            f"a checkpoint of another model: it has no {piece.key!r}"
            + (f" (nearest: {near[0]!r})" if near else "")
            + "; use the model configuration that it was saved with"
        )
    if tuple(saved.size) != piece.global_shape:
        raise CheckpointError(
            f"a checkpoint of another model: {piece.key!r} was saved as {tuple(saved.size)}, "
            f"wanted {piece.global_shape}; use the model configuration that it was saved with"
        )
    return saved


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(piece.box.offset), torch.Size(piece.box.shape))
    data = TensorWriteData(
        chunk, TensorProperties(dtype=piece.tensor.dtype), torch.Size(piece.global_shape)
    )
    return WriteItem(_index(piece.key, piece.box), WriteItemType.SHARD, tensor_data=data)


def _index(key: str, box: Box) -> MetadataIndex:
    return MetadataIndex(key, box.offset)


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _relative(box: Box, outer: Box) -> Box:
    offset = tuple(a - b for a, b in zip(box.offset, outer.offset, strict=True))
    return Box(offset, box.shape)


def _narrow(tensor: Tensor, box: Box) -> Tensor:
    for axis, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(axis, start, length)
    return tensor
