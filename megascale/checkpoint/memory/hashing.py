"""The hash of a slot's values: CRC-32 of every 16 MiB, by several threads, and one over all.

It has to keep up with the whole state of a rank (42 to 53 GB of a 7B model on two GPUs) in every
step. zlib hashes without the interpreter's lock, so threads over chunks scale until memory does
not; a rank takes as many as its share of the node's cores (`share_of_cores`), all but one, which
launches the step. The chunks are hashed as they lie, or as they arrive: the order does not matter.

Why CRC-32: it finds any burst of up to 32 bits in a chunk, and all else (a stray write, values of
another step) but one time in 2**32. Measured on one core of an EPYC 9005: CRC-32 6.9 GB/s, xxh3
31.7 GB/s, SHA-256 0.9, blake2b 0.7; by two threads on two cores in use by others too, 8.9 GB/s.
So xxh3 is four times faster, but where 16 cores are one rank's, CRC-32 reads faster than the copy
from the device (about 50 GB/s) writes, and it is in the standard library; a state of 42 GB takes
6 seconds of a core a step, 3 % of what 16 cores have in a step of 12 s. A sum of words by torch is
as fast as memory, and misses two flipped signs.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

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


def hash_of_chunks(crcs: Sequence[int], num_bytes: int) -> str:
    """The hash of values of `num_bytes` whose chunks have these CRC-32s, in order."""
    assert len(crcs) == len(chunks_of(num_bytes)), (len(crcs), num_bytes)
    return hashlib.sha256(struct.pack(f"<Q{len(crcs)}I", num_bytes, *crcs)).hexdigest()


class Hasher:
    """Hashes by `num_threads` threads; those are made when the first is needed, and kept."""

    def __init__(self, num_threads: int = 1) -> None:
        assert num_threads >= 1, num_threads
        self.num_threads = num_threads
        self._pool: ThreadPoolExecutor | None = None

    def hash_of(self, values: Tensor) -> str:
        """Of a uint8 tensor in host memory."""
        data = values.numpy().data
        chunks = chunks_of(len(data))

        def crc(chunk: tuple[int, int]) -> int:
            return zlib.crc32(data[chunk[0] : chunk[1]])

        if self.num_threads == 1 or len(chunks) < 2:
            return hash_of_chunks([*map(crc, chunks)], len(data))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="slot-hash")
        return hash_of_chunks([*self._pool.map(crc, chunks)], len(data))


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
