"""The hash of values: of chunks by threads as of chunks in order, and every flip is found."""

from __future__ import annotations

import hashlib
import struct
import threading

import pytest
import torch
import xxhash

from megascale.checkpoint.memory.hashing import (
    CHUNK_BYTES,
    Arrival,
    Hasher,
    chunks_of,
    hash_of_chunks,
    num_threads_for,
    share_of_cores,
)


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17])
def test_threads_hash_what_one_hashes(num_bytes: int) -> None:
    values = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    data = values.numpy().tobytes()
    starts = range(0, num_bytes, CHUNK_BYTES)
    hashes = [xxhash.xxh3_64_intdigest(data[start : start + CHUNK_BYTES]) for start in starts]
    reference = hashlib.sha256(
        num_bytes.to_bytes(8, "little") + b"".join(struct.pack("<Q", one) for one in hashes)
    ).hexdigest()
    for num_threads in (1, 2, 5):
        assert Hasher(num_threads).hash_of(values) == reference
    assert hash_of_chunks(hashes, num_bytes) == reference
    assert sum(stop - start for start, stop in chunks_of(num_bytes)) == num_bytes


def test_flips_and_swapped_chunks_are_found() -> None:
    values = torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8)
    values[CHUNK_BYTES:] = 1
    hashes = {Hasher().hash_of(values)}
    for place in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES - 1):
        for bit in (1, 128):
            values[place] ^= bit
            hashes.add(Hasher().hash_of(values))
            values[place] ^= bit
    hashes.add(Hasher().hash_of(values.roll(CHUNK_BYTES)))
    hashes.add(Hasher().hash_of(values[:-1]))
    assert len(hashes) == 11


def test_values_are_hashed_as_they_arrive_and_not_before() -> None:
    whole = (torch.arange(4 * CHUNK_BYTES + 5, dtype=torch.int64) % 251).to(torch.uint8)
    values = torch.zeros_like(whole)
    stops = [CHUNK_BYTES + 1, 3 * CHUNK_BYTES, len(whole)]
    waited: list[int] = []

    def arrive(start: int, stop: int) -> None:
        threading.Event().wait(0.02)
        values[start:stop] = whole[start:stop]
        waited.append(stop)

    arrivals = [
        Arrival(stop, lambda start=start, stop=stop: arrive(start, stop))  # type: ignore[misc]
        for start, stop in zip([0, *stops], stops, strict=False)
    ]
    for num_threads in (1, 3):
        values.zero_()
        assert Hasher(num_threads).hash_of(values, arrivals) == Hasher().hash_of(whole)
    assert waited == stops * 2


def test_cores_are_shared_by_the_ranks_of_a_node() -> None:
    everywhere, own = range(16), range(8, 16)
    assert share_of_cores(everywhere, [everywhere] * 2) == 8.0
    assert share_of_cores(own, [range(8), own]) == 8.0  # pinned: no core is another's
    assert share_of_cores(own, [everywhere, own]) == 4.0
    assert share_of_cores(range(2), [range(2)] * 4) == 0.5


def test_one_core_is_left_to_training() -> None:
    assert [num_threads_for(share) for share in (0.5, 1, 2, 2.9, 4, 16, 128)] == [
        1, 1, 1, 1, 3, 15, 16,
    ]  # fmt: skip
