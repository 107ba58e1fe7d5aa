"""Whole logical tensors, one at a time, in one process: for conversion and generation.

Host memory: the tensor asked for and the blocks last read (at most 512 MiB), not the model. Each
block is checked as it is read; tensors that lie in one block are read from the storage once.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from megascale.checkpoint.load import check_sizes, verify
from megascale.checkpoint.places import Location
from megascale.checkpoint.reading import Files, Limits, Needs, Saved, Want, copy_parts, read_block
from megascale.checkpoint.reading.plan import BlockId
from megascale.checkpoint.reading.saved import SavedTensor
from megascale.errors import CheckpointError
from megascale.shards import Box

_NUM_KEPT = 32  # blocks


class FullReader:
    """Reads a checkpoint by key.

    verified  False: all of it is hashed on opening, so that damage is told before anything was
              made of it. Else what is damaged is told when it is read.
    """

    def __init__(self, path: Location, *, verified: bool = False) -> None:
        if not verified:
            verify(path)
        self.path = path
        self._files: Files = check_sizes(path)
        self._saved = Saved(self._files.read_headers(range(len(self._files.names))))
        self._kept: OrderedDict[BlockId, Tensor] = OrderedDict()

    def keys(self, prefix: str = "") -> list[str]:
        """Sorted keys that begin with `prefix`, for example `master/`."""
        return [key for key in self._saved.keys if key.startswith(prefix)]

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensor(key).shape

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor(key).dtype

    def read(self, key: str) -> Tensor:
        """The whole tensor, on the CPU, in the dtype that was saved."""
        saved = self._tensor(key)
        want = Want(key, saved.shape, Box((0,) * len(saved.shape), saved.shape))
        self._saved.refuse_another_model([want], str(self.path))
        tensor = torch.empty(saved.shape, dtype=saved.dtype)
        needs = Needs(self._saved, Limits(self._files.block_bytes, self._files.block_bytes))
        needs.add(0, 0, want)
        for block in sorted(needs.num_bytes):
            copy_parts(needs.parts(block, 0), self._block(block), [tensor])
        return tensor

    def _block(self, block: BlockId) -> Tensor:
        kept = self._kept.pop(block, None)
        if kept is None:
            kept = read_block(self._files, block)
        self._kept[block] = kept
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return kept

    def _tensor(self, key: str) -> SavedTensor:
        saved = self._saved.tensor(key)
        if saved is None:
            raise CheckpointError(f"{self.path} has no tensor {key!r}; it has {self.keys()[:3]}...")
        return saved
