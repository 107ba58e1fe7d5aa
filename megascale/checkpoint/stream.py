"""The values of tensors end to end, in blocks that are hashed on their way to a storage.

Bounded memory: `_NUM_BUFFERS` blocks, whatever the tensors are; from CUDA in slices through pinned
ones. Filling, hashing and writing go on beside each other: one thread fills, a few hash, whoever
takes the blocks writes.
"""

from __future__ import annotations

import hashlib
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from megascale.storage import BLOCK_BYTES

_NUM_BUFFERS = 6
_NUM_HASHING = 4  # SHA-256 makes 1.9 GB/s on one core


def stream_blocks(
    tensors: Sequence[Tensor], hashes: list[str], *, block_bytes: int = BLOCK_BYTES
) -> Iterator[memoryview]:
    """The bytes of `tensors`, row-major, in blocks; the hex SHA-256 of each goes to `hashes`.

    A block is good until the next is asked for. The tensors must not change meanwhile; on CUDA what
    makes them must have been waited for.
    """
    total = sum(tensor.nbytes for tensor in tensors)
    sizes = [min(block_bytes, total - start) for start in range(0, total, block_bytes)]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    buffers = [_buffer(size, device is not None) for size in sizes[:_NUM_BUFFERS]]
    source = _Source(tensors, block_bytes, device)
    filling, hashing = ThreadPoolExecutor(1), ThreadPoolExecutor(_NUM_HASHING)
    hashed: list[Future[str]] = []

    def fill(number: int) -> memoryview:
        if number >= _NUM_BUFFERS:
            hashed[number - _NUM_BUFFERS].result()  # then its buffer is free
        block = buffers[number % _NUM_BUFFERS][: sizes[number]]
        source.fill(block)
        data = memoryview(block.numpy().data)
        hashed.append(hashing.submit(lambda: hashlib.sha256(data).hexdigest()))
        return data

    filled: deque[Future[memoryview]] = deque()
    try:
        for number in range(len(sizes)):
            while number + len(filled) < min(number + _NUM_BUFFERS, len(sizes)):
                filled.append(filling.submit(fill, number + len(filled)))
            yield filled.popleft().result()
        hashes += [future.result() for future in hashed]
    finally:
        filling.shutdown(cancel_futures=True)
        hashing.shutdown(cancel_futures=True)


class _Source:
    """The bytes of `tensors`, taken piece by piece."""

    def __init__(
        self, tensors: Sequence[Tensor], most_bytes: int, device: torch.device | None
    ) -> None:
        self._stream = torch.cuda.Stream(device) if device else None
        self._slices = (part for tensor in tensors for part in _slices(tensor, most_bytes))
        self._rest = torch.empty(0, dtype=torch.uint8)

    def fill(self, block: Tensor) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            start = 0
            while start < len(block):
                if not len(self._rest):
                    self._rest = next(self._slices)
                num_bytes = min(len(self._rest), len(block) - start)
                block[start : start + num_bytes].copy_(self._rest[:num_bytes], non_blocking=True)
                self._rest = self._rest[num_bytes:]
                start += num_bytes
        if self._stream is not None:
            self._stream.synchronize()


def _buffer(num_bytes: int, pinned: bool) -> Tensor:
    """Page-aligned."""
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _slices(tensor: Tensor, most_bytes: int) -> Iterator[Tensor]:
    """Contiguous bytes [N], of views where they can be; copies of at most `most_bytes`."""
    tensor = tensor.detach()
    if tensor.is_contiguous() or tensor.nbytes <= most_bytes:
        if tensor.numel():
            # not `view(-1)`: of a single element it keeps a stride that may be anything
            yield tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return
    row_bytes = tensor.nbytes // len(tensor)
    if row_bytes > most_bytes:
        for row in tensor:
            yield from _slices(row, most_bytes)
        return
    for rows in tensor.split(most_bytes // row_bytes):
        yield from _slices(rows, most_bytes)
