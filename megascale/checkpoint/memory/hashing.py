"""The hash of a slot's values: xxh3 of every 16 MiB, by several threads, and one over all.

It has to keep up with the whole state of a rank (42 to 53 GB of a 7B model on two GPUs) in every
step. The library hashes without the interpreter's lock, so threads over chunks scale until memory
does not; a rank takes as many as its share of the node's cores (`share_of_cores`), all but one,
which launches the step. Chunks are hashed as they arrive (`Arrival`), so that what is left when the
last byte is there is a few of them.

Why xxh3: 64 bits find a stray write or values of another step but one time in 2**64, and it is the
one that keeps up. A core of an EPYC 9005: xxh3 9 to 32 GB/s, CRC-32 6.9, SHA-256 2.0, blake2b 1.1.
A host of an H200 made 2.1 GB/s of CRC-32 a core and 25 by all 16, less than half of what its copy
from the device brings (55): every step of 1.2 s with a state of 45 GB then took 3.2. A sum of words
by torch is as fast as memory, and misses two flipped signs.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import xxhash
from torch import Tensor

CHUNK_BYTES = 16 << 20
_MAX_THREADS = 16  # more do not read host memory faster


def crc_of(values: Tensor | bytes | memoryview) -> int:
    """CRC-32 of bytes, or of a uint8 tensor in host memory."""
    return zlib.crc32(values.numpy().data if isinstance(values, Tensor) else values)


def chunks_of(num_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) of every chunk."""
    return [
        (start, min(start + CHUNK_BYTES, num_bytes)) for start in range(0, num_bytes, CHUNK_BYTES)
    ]


def hash_of_chunk(values: Tensor | bytes | memoryview) -> int:
    """64 bits of xxh3."""
    data = values.numpy().data if isinstance(values, Tensor) else values
    return xxhash.xxh3_64_intdigest(data)


def hash_of_chunks(hashes: Sequence[int], num_bytes: int) -> str:
    """The hash of values of `num_bytes` whose chunks have these hashes, in order."""
    assert len(hashes) == len(chunks_of(num_bytes)), (len(hashes), num_bytes)
    return hashlib.sha256(struct.pack(f"<Q{len(hashes)}Q", num_bytes, *hashes)).hexdigest()


@dataclass(frozen=True)
class Arrival:
    """Values up to byte `stop` are there once `wait` returns; those behind may not be."""

    stop: int
    wait: Callable[[], None]


class Hasher:
    """Hashes by `num_threads` threads; those are made when the first is needed, and kept."""

    def __init__(self, num_threads: int = 1) -> None:
        assert num_threads >= 1, num_threads
        self.num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None

    def hash_of(self, values: Tensor, arrivals: Sequence[Arrival] = ()) -> str:
        """Of a uint8 tensor in host memory.

        arrivals  by `stop`, where values are still on their way; behind the last all are there
        """
        data = values.numpy().data
        chunks = chunks_of(len(data))

        def hash_one(chunk: tuple[int, int]) -> int:
            return hash_of_chunk(data[chunk[0] : chunk[1]])

        if not arrivals and (self.num_threads == 1 or len(chunks) < 2):
            return hash_of_chunks([*map(hash_one, chunks)], len(data))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="slot-hash")
        hashes: list[Future[int]] = []
        for arrival in arrivals:
            arrival.wait()
            there = [chunk for chunk in chunks[len(hashes) :] if chunk[1] <= arrival.stop]
            hashes += [self._pool.submit(hash_one, chunk) for chunk in there]
        hashes += [self._pool.submit(hash_one, chunk) for chunk in chunks[len(hashes) :]]
        return hash_of_chunks([one.result() for one in hashes], len(data))


def own_cores() -> frozenset[int]:
    """That this process may run on."""
    return frozenset(os.sched_getaffinity(0))


def share_of_cores(own: Collection[int], of_node: Sequence[Collection[int]]) -> float:
    """How many cores a rank has for itself: a core that several ranks may use counts in parts.

    own      cores of the rank
    of_node  cores of each rank of its node, itself included
    """
    return sum(1 / sum(core in cores for cores in of_node) for core in own)


def num_threads_for(share: float) -> int:
    """Of hashing, for a rank with `share` cores: one is left to the thread that trains."""
    return max(1, min(int(share) - 1, _MAX_THREADS))
