"""The ring gives every rank what its own loader would have read, and says who is missing."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.data.loader import GlobalBatch, GlobalBatchLoader
from megascale.data.mixture import ShuffledSamples
from megascale.data.node.filling import Filler, Positions, training_positions, validation_positions
from megascale.data.node.node import Place, start_of
from megascale.data.node.ring import ALL, Ring, stamp
from megascale.data.node.shape import RingShape
from megascale.data.node.source import NodeBatches, NodeMemory
from megascale.data.samples import Sample
from megascale.errors import DataError, LaunchError

SEQ_LEN = 5


class Counting:
    """37 samples, the bits of their numbers as mask, three documents; counts what is read."""

    seq_len, vocab_size = SEQ_LEN, 64

    def __init__(self, bad: int | None = None) -> None:
        self.num_read: dict[int, int] = {}
        self._bad = bad

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Sample:
        self.num_read[index] = self.num_read.get(index, 0) + 1
        if index == self._bad:
            raise DataError(f"x.bin is damaged: sample {index}")
        window = index + np.arange(SEQ_LEN + 1)
        starts = np.array([0, 0, 2, 2, index % 2 * 4], np.int32)
        mask = (index >> np.arange(SEQ_LEN) & 1).astype(np.float32)
        return Sample(window[:-1], window[1:], mask, starts)


class Node:
    """A ring in memory of this process, and its ranks, which are all here."""

    def __init__(self, shape: RingShape, dataset: Counting, *, deadline_s: float = 20.0) -> None:
        self.descriptor = os.memfd_create("test")
        os.ftruncate(self.descriptor, shape.num_bytes)
        place = Place(os.getpid(), self.descriptor, os.getpid(), start_of(os.getpid()) or 0)
        self.ring = Ring(memoryview(mmap.mmap(self.descriptor, 0)), shape)
        self.ring.clear()
        ranks = range(shape.num_readers)
        self.memories = [NodeMemory(place, [shape], ranks, deadline_s=deadline_s) for _ in ranks]
        self.filler = Filler(self.ring, [ShuffledSamples(dataset, 3)])

    def rank(self, rank: int, dp_rank: int, generation: int, at: Positions) -> NodeBatches:
        memory = self.memories[rank]
        return NodeBatches(
            memory, memory.rings[0], generation, at, global_rank=rank, dp_rank=dp_rank
        )

    @contextmanager
    def filling(self) -> Iterator[None]:
        """A thread in the place of the loader's process."""
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                if not self.filler.advance():
                    time.sleep(1e-4)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def close(self) -> None:
        for memory in self.memories:
            memory.close()
        self.ring.close()
        os.close(self.descriptor)


def shape_of(
    *, tp: int = 1, dp: int = 1, slots: int = 3, micro: int = 1, rows: int = 16
) -> RingShape:
    return RingShape(slots, tp * dp, tuple(range(dp)), dp, micro, rows, SEQ_LEN, True)


def same(got: GlobalBatch, expected: GlobalBatch) -> None:
    assert (got.first_sample, got.num_samples) == (expected.first_sample, expected.num_samples)
    for a, b in zip(got.micro_batches, expected.micro_batches, strict=True):
        for name in ("windows_BW", "loss_mask_BS", "sample_numbers_B", "document_starts_BS"):
            left, right = getattr(a, name), getattr(b, name)
            assert left.dtype == right.dtype, name
            np.testing.assert_array_equal(left, right, err_msg=name)


@given(
    tp=st.integers(1, 2),
    dp=st.sampled_from([1, 2, 4]),
    micro=st.integers(1, 2),
    slots=st.integers(1, 4),
    consumed=st.integers(0, 200),
    ramp=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
@settings(max_examples=40, deadline=None)
def test_ranks_get_what_a_loader_of_their_own_reads(
    tp: int, dp: int, micro: int, slots: int, consumed: int, ramp: bool, seed: int
) -> None:
    """In any layout, from any position, over epochs, with growing batches, at any pace."""
    unit = micro * dp
    shape = shape_of(tp=tp, dp=dp, slots=slots, micro=micro, rows=3 * micro)

    def size_at(first: int) -> int:
        return unit * (1 + min(first // 20, 2)) if ramp else 2 * unit

    dataset = Counting()
    node = Node(shape, dataset)
    sources = [
        node.rank(r, r // tp, 1, training_positions(size_at, consumed)) for r in range(tp * dp)
    ]
    loaders = [
        GlobalBatchLoader(
            ShuffledSamples(Counting(), 3), micro_batch_size=micro, dp_rank=r // tp, dp_size=dp,
            batch_size_at=size_at, consumed_samples=consumed, prefetch=0,
        )
        for r in range(tp * dp)
    ]  # fmt: skip
    node.filler.begin(1, training_positions(size_at, consumed))
    random = np.random.default_rng(seed)
    left = [4] * len(sources)
    with node.filling():
        while any(left):
            ahead = [r for r, n in enumerate(left) if n and n >= max(left) - slots + 1]
            rank = int(random.choice(ahead))
            same(next(sources[rank]), next(loaders[rank]))
            left[rank] -= 1
    for loader in loaders:
        loader.close()
    node.close()


def test_a_sample_is_read_once_a_node() -> None:
    shape = shape_of(tp=2, dp=2, slots=2, micro=2, rows=8)
    dataset = Counting()
    node = Node(shape, dataset)
    at = [training_positions(lambda _: 16, 0) for _ in range(5)]
    sources = [node.rank(r, r // 2, 1, at[r]) for r in range(4)]
    node.filler.begin(1, at[4])
    with node.filling():
        for _ in range(2):
            for source in sources:
                next(source)
        deadline = time.monotonic() + 10
        while sum(dataset.num_read.values()) < 64 and time.monotonic() < deadline:
            time.sleep(0.001)  # two batches ahead, 64 samples of 37
    assert sum(dataset.num_read.values()) == 64
    assert max(dataset.num_read.values()) == 2
    node.close()


def test_another_position_voids_what_was_ahead() -> None:
    shape = shape_of(tp=2, slots=3, rows=4)
    node = Node(shape, Counting())

    def at(first: int) -> Positions:
        return training_positions(lambda _: 4, first)

    old = [node.rank(r, 0, 1, at(0)) for r in range(2)]
    node.filler.begin(1, at(0))
    with node.filling():
        next(old[0])
        next(old[1])
        next(old[0])  # one rank is further
    node.filler.begin(2, at(100))
    new = node.rank(0, 0, 2, at(100))
    assert not node.filler.advance(), "rank 1 may still copy from the old generation"
    later = node.rank(1, 0, 2, at(100))
    with node.filling():
        assert [next(new).first_sample for _ in range(3)] == [100, 104, 108]
        assert [next(later).first_sample for _ in range(3)] == [100, 104, 108]
    node.close()


def test_validation_comes_round_part_by_part() -> None:
    shape = shape_of(slots=2, rows=4)
    node = Node(shape, Counting())
    node.filler = Filler(node.ring, [ShuffledSamples(Counting(), seed) for seed in (3, 4)])
    source = node.rank(0, 0, 1, validation_positions([2, 1], 4))
    node.filler.begin(1, validation_positions([2, 1], 4))
    loaders = [
        GlobalBatchLoader(
            ShuffledSamples(Counting(), seed), micro_batch_size=1, dp_rank=0, dp_size=1,
            batch_size_at=lambda _: 4, prefetch=0,
        )
        for seed in (3, 4)
    ]  # fmt: skip
    with node.filling():
        for _ in range(2):
            same(next(source), loaders[0].read(0, 4))
            same(next(source), loaders[0].read(4, 4))
            same(next(source), loaders[1].read(0, 4))
    for loader in loaders:
        loader.close()
    node.close()


def test_a_damaged_sample_is_raised_by_the_next_that_needs_it() -> None:
    order = ShuffledSamples(Counting(), 3)
    bad = order.index(9)  # of the third batch
    node = Node(shape_of(dp=2, slots=3, rows=2), Counting(bad))
    at = [training_positions(lambda _: 4, 0) for _ in range(3)]
    sources = [node.rank(r, r, 1, at[r]) for r in range(2)]
    node.filler.begin(1, at[2])
    with node.filling():
        for source in sources:
            assert [next(source).first_sample for _ in range(2)] == [0, 4]
            with pytest.raises(DataError, match=f"x.bin is damaged: sample {bad}"):
                next(source)
    node.close()


def test_a_rank_that_takes_nothing_stops_others_behind_the_ring_only() -> None:
    node = Node(shape_of(tp=2, slots=2, rows=1), Counting(), deadline_s=0.3)
    at = [training_positions(lambda _: 1, 0) for _ in range(3)]
    source, _ = node.rank(0, 0, 1, at[0]), node.rank(1, 0, 1, at[1])
    node.filler.begin(1, at[2])
    with node.filling():
        assert [next(source).first_sample for _ in range(2)] == [0, 1]
        with pytest.raises(LaunchError, match=r"rank\(s\) 1 of this node have not taken"):
            next(source)
    node.close()


def test_a_loader_that_hangs_is_named_with_its_sample() -> None:
    node = Node(shape_of(slots=2, rows=1), Counting(), deadline_s=0.3)
    source = node.rank(0, 0, 1, training_positions(lambda _: 1, 0))
    node.ring.alive(1234)
    with pytest.raises(LaunchError, match=r"process \d+\) has been at sample 1234 for \d s"):
        next(source)
    node.close()


def test_the_last_words_of_a_loader_are_told() -> None:
    node = Node(shape_of(slots=2, rows=1), Counting())
    source = node.rank(0, 0, 1, training_positions(lambda _: 1, 0))
    assert not source.is_ready()
    node.ring.fail(ALL, "MemoryError()", 1)
    assert source.is_ready()
    with pytest.raises(LaunchError, match=r"failed: MemoryError\(\); the batch from sample 0 on"):
        next(source)
    node.close()


def test_a_torn_share_is_looked_at_again() -> None:
    """A stamp may be seen before the bytes on a weakly ordered CPU."""
    node = Node(shape_of(slots=1, rows=1), Counting())
    source = node.rank(0, 0, 1, training_positions(lambda _: 1, 0))
    node.filler.begin(1, training_positions(lambda _: 1, 0))
    while node.filler.advance():
        pass
    right = int(node.ring.share(0, 0).windows_RW[0, 0])

    def write(token: int) -> None:
        node.ring.share(0, 0).windows_RW[0, 0] = token

    write(right + 1)
    assert node.ring.copy(0, 0, 1) is None
    timer = threading.Timer(0.05, write, [right])
    timer.start()
    assert next(source).micro_batches[0].windows_BW[0, 0] == right
    timer.join()
    node.close()


def test_stamps_grow_with_batches_and_generations() -> None:
    stamps = [stamp(g, n) for g in (1, 2, 7) for n in (-1, 0, 1, 10**9)]
    assert stamps == sorted(set(stamps))
    assert stamps[0] > 0


def test_shares_of_a_slot_do_not_overlap() -> None:
    shape = RingShape(3, 8, (1, 4), 8, 2, 6, 13, True)
    at = [shape.share_at(slot, share) for slot in range(3) for share in range(2)]
    assert all(b - a >= shape.share_bytes for a, b in pairwise(at))
    assert shape.mask_at >= 6 * 14 * 4
    assert shape.documents_at >= shape.mask_at + 6 * 2
    assert shape.share_bytes >= shape.documents_at + 6 * 13 * 4
    assert shape.num_bytes >= at[-1] + shape.share_bytes
    assert RingShape.from_json(shape.to_json()) == shape


def test_memory_does_not_grow_with_tensor_ranks() -> None:
    one, eight = shape_of(tp=1, dp=4), shape_of(tp=8, dp=4)
    assert one.num_bytes == eight.num_bytes
    assert shape_of(tp=1, dp=8).num_bytes > one.num_bytes
