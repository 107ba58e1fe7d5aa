"""The loader's order is the formula's, in every layout, from every position."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from megascale.data.loader import GlobalBatchLoader, MicroBatch, sample_numbers
from megascale.data.mixture import ShuffledSamples
from megascale.data.samples import Sample, SyntheticDataset
from megascale.data.shuffle import sample_index
from megascale.errors import DataError

_SEED = 5


class _Numbered:
    """Sample i is i, i + 1, ... with a mask of its bits; 37 samples: batches straddle epochs."""

    seq_len = 4
    vocab_size = 37

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> Sample:
        tokens = index + np.arange(self.seq_len)
        return Sample(tokens, tokens + 1, _bits(index).astype(np.float32))


def _bits(index: int) -> NDArray[np.bool_]:
    return (index >> np.arange(4) & 1).astype(np.bool_)


def _loader(
    dp_rank: int,
    dp_size: int,
    *,
    micro: int = 2,
    batch: int = 16,
    consumed: int = 0,
    prefetch: int = 2,
) -> GlobalBatchLoader:
    return GlobalBatchLoader(
        ShuffledSamples(_Numbered(), _SEED),
        micro_batch_size=micro,
        dp_rank=dp_rank,
        dp_size=dp_size,
        batch_size_at=lambda _: batch,
        consumed_samples=consumed,
        prefetch=prefetch,
    )


def _take(loader: GlobalBatchLoader, steps: int) -> list[list[MicroBatch]]:
    taken = [list(next(loader).micro_batches) for _ in range(steps)]
    loader.close()
    return taken


@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_order_equals_the_formula(dp_size: int, prefetch: int) -> None:
    micro, batch, steps = 2, 16, 5
    for dp_rank in range(dp_size):
        for step, micro_batches in enumerate(
            _take(_loader(dp_rank, dp_size, prefetch=prefetch), steps)
        ):
            assert len(micro_batches) == batch // (micro * dp_size)
            for j, got in enumerate(micro_batches):
                first = step * batch + (j * dp_size + dp_rank) * micro
                numbers_B = np.arange(first, first + micro)
                _, indices_B = sample_index(numbers_B, 37, _SEED)
                assert got.sample_numbers_B.tolist() == numbers_B.tolist()
                assert got.tokens_BS.tolist() == [[i, i + 1, i + 2, i + 3] for i in indices_B]
                assert got.labels_BS.tolist() == [[i + 1, i + 2, i + 3, i + 4] for i in indices_B]
                assert got.loss_mask_BS.tolist() == [_bits(i).tolist() for i in indices_B]
                assert got.windows_BW.dtype == np.int32


def test_all_layouts_train_a_step_on_the_same_samples() -> None:
    for step in range(4):
        for micro in (1, 2, 4):
            for dp_size in (1, 2, 4):
                seen = np.concatenate(
                    [
                        sample_numbers(16 * step, 16, micro, r, dp_size).ravel()
                        for r in range(dp_size)
                    ]
                )
                assert sorted(seen.tolist()) == list(range(16 * step, 16 * step + 16))


def test_an_epoch_visits_every_sample_once() -> None:
    steps = _take(_loader(0, 1, micro=1, batch=37), 3)
    for micro_batches in steps:
        assert sorted(int(m.tokens_BS[0, 0]) for m in micro_batches) == list(range(37))


@pytest.mark.parametrize("resumed_at", [1, 3])
def test_resuming_continues_the_same_samples(resumed_at: int) -> None:
    whole = _take(_loader(1, 2), 6)
    rest = _take(_loader(1, 2, consumed=16 * resumed_at), 6 - resumed_at)
    for expected, got in zip(whole[resumed_at:], rest, strict=True):
        for a, b in zip(expected, got, strict=True):
            assert a.sample_numbers_B.tolist() == b.sample_numbers_B.tolist()
            assert a.tokens_BS.tolist() == b.tokens_BS.tolist()


def test_ramp_up_counts_what_was_consumed() -> None:
    loader = GlobalBatchLoader(
        ShuffledSamples(SyntheticDataset(10, 4, seed=0), 0),
        micro_batch_size=2,
        dp_rank=0,
        dp_size=2,
        batch_size_at=lambda consumed: 4 if consumed < 8 else 8,
    )
    steps = [next(loader) for _ in range(4)]
    loader.close()
    assert [(s.first_sample, s.num_samples) for s in steps] == [(0, 4), (4, 4), (8, 8), (16, 8)]
    assert [len(s.micro_batches) for s in steps] == [1, 1, 2, 2]


def test_any_step_can_be_read_directly() -> None:
    loader = _loader(0, 2)
    next(loader)
    direct = loader.read(32, 16)
    third = [next(loader), next(loader)][1]
    loader.close()
    assert [m.tokens_BS.tolist() for m in direct.micro_batches] == [
        m.tokens_BS.tolist() for m in third.micro_batches
    ]


class _Counting(_Numbered):
    def __init__(self) -> None:
        self.num_read = 0
        self.reached = threading.Event()

    def __getitem__(self, index: int) -> Sample:
        self.num_read += 1
        if self.num_read == 24:
            self.reached.set()
        return super().__getitem__(index)


def test_reads_ahead_so_far_and_no_further() -> None:
    dataset = _Counting()
    loader = GlobalBatchLoader(
        ShuffledSamples(dataset, 0), micro_batch_size=1, dp_rank=0, dp_size=1,
        batch_size_at=lambda _: 8, prefetch=2,
    )  # fmt: skip
    next(loader)
    assert dataset.reached.wait(timeout=10)  # the batch taken and two ahead, unasked
    loader.close()
    assert dataset.num_read == 24


class _Failing(_Numbered):
    def __getitem__(self, index: int) -> Sample:
        raise DataError("x.bin is cut short: expected 12 bytes, found 10")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failed_read_is_raised_by_next(prefetch: int) -> None:
    loader = GlobalBatchLoader(
        ShuffledSamples(_Failing(), 0), micro_batch_size=1, dp_rank=0, dp_size=1,
        batch_size_at=lambda _: 8, prefetch=prefetch,
    )  # fmt: skip
    with pytest.raises(DataError, match="expected 12 bytes, found 10"):
        next(loader)
    loader.close()


def test_closing_ends_the_thread() -> None:
    loader = _loader(0, 1)
    next(loader)
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("batch-reader")]
