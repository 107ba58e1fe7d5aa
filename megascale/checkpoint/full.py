"""Whole logical tensors, one at a time, in one process: for conversion and generation.

Host memory: the tensor asked for and one saved chunk, not the model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from megascale.checkpoint.load import verify
from megascale.checkpoint.pieces import Piece
from megascale.checkpoint.planner import PieceLoadPlanner
from megascale.errors import CheckpointError
from megascale.shards import Box


class FullReader:
    """Reads a checkpoint by key; hashes are checked on opening unless `verified`."""

    def __init__(self, path: Path, *, verified: bool = False) -> None:
        if not verified:
            verify(path)
        self.path = path
        self._reader = FileSystemReader(path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def keys(self, prefix: str = "") -> list[str]:
        """Sorted keys that begin with `prefix`, for example `master/`."""
        return sorted(key for key in self._metadata.state_dict_metadata if key.startswith(prefix))

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._entry(key).size)

    def dtype(self, key: str) -> torch.dtype:
        return self._entry(key).properties.dtype

    def read(self, key: str) -> Tensor:
        """The whole tensor, on the CPU, in the dtype that was saved."""
        shape = self.shape(key)
        tensor = torch.empty(shape, dtype=self.dtype(key))
        planner = PieceLoadPlanner([Piece(key, shape, Box((0,) * len(shape), shape), tensor)])
        planner.set_up_planner({}, self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.path} has no tensor {key!r}; it has {self.keys()[:3]}...")
        return entry
