"""SHA-256 block by block: hashed by a few threads, read so that nothing unverified is used.

hashlib lets go of the interpreter while it hashes (2.0 GB/s a core where the core has SHA
instructions), so threads hash on several cores, beside others that read or write.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megascale.errors import CheckpointError
from megascale.storage.interface import BLOCK_BYTES, Storage

NUM_READERS = 4  # of one file at least: while some hash, others keep the disk busy
MOST_THREADS = 8  # of one file


def num_hashing_threads() -> int:
    """Beside a write, which has threads of its own."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def num_reading_threads() -> int:
    """Each reads a block, then hashes it."""
    return max(NUM_READERS, num_hashing_threads())


def block_starts(header_bytes: int, num_bytes: int) -> range:
    """Where each block behind the header of a file of `num_bytes` starts."""
    return range(header_bytes, num_bytes, BLOCK_BYTES)


def sha256(data: memoryview | bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def page_aligned(num_bytes: int) -> memoryview:
    """A new buffer that a disk can fill by itself."""
    return memoryview(mmap.mmap(-1, max(num_bytes, 1)))[:num_bytes]


def hash_view(view: memoryview, pool: ThreadPoolExecutor) -> list[Future[str]]:
    """The hash of each block of `view`, as they become ready."""
    return [
        pool.submit(sha256, view[start : start + BLOCK_BYTES])
        for start in range(0, view.nbytes, BLOCK_BYTES)
    ]


def read_block(storage: Storage, name: str, start: int, out: memoryview, sha256_hex: str) -> None:
    """Fill `out` from byte `start` on, and hold it to its hash. `out` is at its full speed where it
    is page-aligned. Raises CheckpointError, with `out` filled by what must not be used."""
    storage.read_into(name, start, out)
    found = sha256(out)
    if found != sha256_hex:
        raise CheckpointError(
            f"{storage.url}: {name} is damaged: bytes {start:,} to {start + out.nbytes:,} have "
            f"SHA-256 {found[:16]}..., not {sha256_hex[:16]}...; use another copy"
        )


def check_file(
    storage: Storage,
    name: str,
    num_bytes: int,
    header_bytes: int,
    header_sha256: str,
    blocks: Sequence[str],
    *,
    num_threads: int | None = None,
    moved: Callable[[int], None] = lambda _: None,
) -> None:
    """Read a whole file and hold it to its size and hashes; CheckpointError at the first that is
    wrong. Memory: a block a thread."""
    found = storage.size(name)
    if found != num_bytes:
        has = "is missing" if found is None else f"has {found:,} bytes, not {num_bytes:,}"
        raise CheckpointError(f"{storage.url}: {name} {has}; use another copy")
    starts = block_starts(header_bytes, num_bytes)
    if len(starts) != len(blocks):
        raise CheckpointError(
            f"{storage.url}: {name} has {len(starts)} blocks, hashes were kept of {len(blocks)}; "
            "use another copy"
        )
    read_block(storage, name, 0, page_aligned(header_bytes), header_sha256)
    moved(header_bytes)
    wanted = dict(zip(starts, blocks, strict=True))

    def hold(start: int, block: memoryview) -> None:
        read_block(storage, name, start, block, wanted[start])

    for block in _each_block(starts, num_bytes, hold, num_threads or num_reading_threads()):
        moved(block.nbytes)


def blocks_in_order(
    storage: Storage, name: str, header_bytes: int, num_bytes: int, hashes: list[str]
) -> Iterator[memoryview]:
    """Header and blocks of a file one after another, the next ones being read meanwhile; `hashes`
    takes the SHA-256 of each. A yielded buffer is reused once the next is asked for."""
    header = page_aligned(header_bytes)
    storage.read_into(name, 0, header)
    hashes.append(sha256(header))
    yield header
    starts = block_starts(header_bytes, num_bytes)
    found: dict[int, str] = {}

    def read(start: int, block: memoryview) -> None:
        storage.read_into(name, start, block)
        found[start] = sha256(block)

    for start, block in zip(starts, _each_block(starts, num_bytes, read, NUM_READERS), strict=True):
        hashes.append(found.pop(start))
        yield block


def _each_block(
    starts: range, num_bytes: int, fill: Callable[[int, memoryview], None], num_threads: int
) -> Iterator[memoryview]:
    """Blocks in order, filled by `num_threads` ahead of whoever takes them."""
    free = [page_aligned(BLOCK_BYTES) for _ in range(min(num_threads + 1, len(starts)))]
    under_way: deque[Future[memoryview]] = deque()
    left = iter(starts)

    def filled(start: int, buffer: memoryview) -> memoryview:
        block = buffer[: min(BLOCK_BYTES, num_bytes - start)]
        fill(start, block)
        return block

    with ThreadPoolExecutor(num_threads, thread_name_prefix="blocks") as pool:
        try:
            while True:
                while free and (start := next(left, None)) is not None:
                    under_way.append(pool.submit(filled, start, free.pop()))
                if not under_way:
                    return
                block = under_way.popleft().result()
                yield block
                free.append(memoryview(block.obj)[:BLOCK_BYTES])
        finally:
            for future in under_way:
                future.cancel()
