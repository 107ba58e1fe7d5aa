"""Blocks of a checkpoint, read ahead by threads, each checked against its hash.

Reading and hashing let go of the interpreter, so a few threads keep a disk busy while the caller
copies. At most `num_buffers` blocks are in memory: a buffer is read into again once its block was
released. Buffers are page-aligned, so that a local storage can read past the page cache; pinned
where the values go to a GPU, and then not touched before the copies out of them have ended.
"""

from __future__ import annotations

import hashlib
import mmap
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillRunning
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.errors import CheckpointError
from megascale.storage import Storage

_HUGE_PAGE_BYTES = 2 << 20


class DamagedError(CheckpointError):
    """The files are not those that were saved: another checkpoint may be whole."""


@dataclass(frozen=True)
class Source:
    """Bytes of a file, and the SHA-256 (hex) that vouches for them."""

    name: str
    start: int
    num_bytes: int
    sha256: str


@dataclass
class Buffer:
    """`view` is the memory of `tensor` (uint8). `busy`: copies out of it may still be running."""

    tensor: Tensor
    view: memoryview
    busy: torch.cuda.Event | None = None


def make_buffer(num_bytes: int, *, pinned: bool) -> Buffer:
    if pinned:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return Buffer(tensor, tensor.numpy().data)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE_BYTES:  # less for the kernel to pin, read by read
        memory.madvise(mmap.MADV_HUGEPAGE)
    return Buffer(torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory))


def read_verified(storage: Storage, source: Source, out: memoryview) -> None:
    """Fill `out`; raises DamagedError where the bytes are not those that were saved."""
    storage.read_into(source.name, source.start, out)
    got = hashlib.sha256(out).hexdigest()
    if got != source.sha256:
        raise DamagedError(
            f"{storage.url}/{source.name}: bytes {source.start:,} to "
            f"{source.start + source.num_bytes:,} have SHA-256 {got[:12]}..., "
            f"{source.sha256[:12]}... was saved (they were changed); use another checkpoint"
        )


class Window:
    """Yields the blocks of `sources` in order. For one caller."""

    def __init__(
        self,
        storage: Storage,
        sources: Iterable[Source],
        *,
        block_bytes: int,
        pinned: bool = False,
        num_threads: int | None = None,
    ) -> None:
        self._storage = storage
        self._left = deque(sources)
        # an object store answers late and in parallel; a disk does well with few
        threads = num_threads or (4 if storage.is_local else 8)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="read")
        self._under_way: deque[tuple[Source, Future[Buffer]]] = deque()
        for _ in range(min(threads + 4, len(self._left))):
            self.release(make_buffer(block_bytes, pinned=pinned))

    def next(self, timeout_s: float) -> tuple[Buffer, Tensor]:
        """The next block: its buffer, and its bytes. Raises what reading it raised."""
        source, future = self._under_way.popleft()
        try:
            buffer = future.result(max(timeout_s, 0.001))
        except StillRunning:
            raise CheckpointError(
                f"{self._storage.url}/{source.name} was not read in time; look at the storage"
            ) from None
        return buffer, buffer.tensor[: source.num_bytes]

    def release(self, buffer: Buffer) -> None:
        """The block is not needed any more (but for copies that `buffer.busy` tells of)."""
        if self._left:
            source = self._left.popleft()
            self._under_way.append((source, self._threads.submit(self._fill, source, buffer)))

    def close(self) -> None:
        """Stop reading. What hangs in the storage is not waited for: its own deadline ends it."""
        self._left.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fill(self, source: Source, buffer: Buffer) -> Buffer:
        if buffer.busy is not None:
            buffer.busy.synchronize()
        read_verified(self._storage, source, buffer.view[: source.num_bytes])
        return buffer
