"""Where the pieces of a rank lie in a slot's body, and the copies to there and back.

The table names pieces by key and global box, as a checkpoint on disk does. Pieces that are
neighbours in live storage are copied as one: a model of thousands of parameters is a few copies.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megascale.checkpoint.memory.slot import HEADER_BYTES, aligned, crc_of
from megascale.checkpoint.pieces import Piece


@dataclass(frozen=True)
class _Stretch:
    """Live elements that are contiguous, from byte `start` of the body on."""

    tensor: Tensor
    start: int


class Body:
    """The layout of a rank's pieces. Equal pieces give equal tables, in every process."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        stretches: list[_Stretch] = []
        entries = []
        position = 0
        for piece in pieces:
            tensor = piece.tensor.detach()
            if stretches and _follows(tensor, stretches[-1].tensor):
                start = position
                last = stretches.pop()
                stretches.append(_Stretch(_joined(last.tensor, tensor), last.start))
            else:
                start = aligned(position)
                stretches.append(_Stretch(tensor, start))
            position = start + piece.num_bytes
            dtype = str(tensor.dtype).removeprefix("torch.")
            box = piece.box
            entries.append([piece.key, piece.global_shape, box.offset, box.shape, dtype, start])
        self._stretches = stretches
        self.table = json.dumps(entries, separators=(",", ":")).encode()
        self.table_crc = crc_of(self.table)
        self.num_bytes = position

    @property
    def num_copies(self) -> int:
        return len(self._stretches)

    @property
    def start(self) -> int:
        """Of the values in the file."""
        return aligned(HEADER_BYTES + len(self.table))

    @property
    def image_bytes(self) -> int:
        """Of the file."""
        return self.start + self.num_bytes

    def copy_out(self, image: Tensor) -> None:
        """Live values to a slot. On CUDA queued in the current stream, and not waited for."""
        for live, kept in self._pairs(image):
            kept.copy_(live, non_blocking=True)

    @torch.no_grad()
    def copy_in(self, image: Tensor) -> None:
        """Values of a slot to live storage. On CUDA queued as `copy_out`."""
        for live, kept in self._pairs(image):
            live.copy_(kept, non_blocking=True)

    def _pairs(self, image: Tensor) -> list[tuple[Tensor, Tensor]]:
        pairs = []
        for stretch in self._stretches:
            live = stretch.tensor
            first = self.start + stretch.start
            kept = image[first : first + live.numel() * live.element_size()]
            pairs.append((live, kept.view(live.dtype).view(live.shape)))
        return pairs


def _follows(tensor: Tensor, before: Tensor) -> bool:
    """Begins `tensor` in storage where `before` ends, both contiguous?"""
    return (
        tensor.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and tensor.dtype == before.dtype
        and tensor.is_contiguous()
        and before.is_contiguous()
        and tensor.storage_offset() == before.storage_offset() + before.numel()
    )


def _joined(first: Tensor, second: Tensor) -> Tensor:
    num = prod(first.shape) + prod(second.shape)
    return first.as_strided((num,), (1,), first.storage_offset())
