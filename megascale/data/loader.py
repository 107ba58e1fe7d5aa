"""From data position to micro-batches (MegaScale 3.4): what one data-parallel rank trains on.

A step is (first global sample number, global batch size). Its micro-batch j on data rank r holds

    first + (j * dp_size + r) * micro_batch_size + [0, micro_batch_size)

so any layout trains a step on the same samples, and resuming needs the one number `consumed`. A
thread reads ahead while the accelerator computes; the order is known, so nothing is sent to it.

MegaScale's two-layer tree, one reader a node and ranks that copy from shared memory, is another
`BatchSource`: it replaces who reads, never which samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megascale.data.samples import Dataset
from megascale.data.shuffle import sample_index


@dataclass(frozen=True)
class MicroBatch:
    """B samples of S positions; `sample_numbers_B` counts from the start of training."""

    tokens_BS: NDArray[np.int64]
    labels_BS: NDArray[np.int64]
    loss_mask_BS: NDArray[np.float32]
    sample_numbers_B: NDArray[np.int64]


@dataclass(frozen=True)
class GlobalBatch:
    """One step's position, and this data rank's share of it in the order of execution."""

    first_sample: int
    num_samples: int
    micro_batches: tuple[MicroBatch, ...]


class BatchSource(Protocol):
    """What the training loop needs of a loader: it blocks in `__next__`, which never ends."""

    def __next__(self) -> GlobalBatch: ...

    def close(self) -> None: ...


def sample_numbers(
    first_sample: int, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> NDArray[np.int64]:
    """Global sample numbers [micro-batches, B] of one data rank's share of a step."""
    unit = micro_batch_size * dp_size
    assert global_batch_size % unit == 0, (global_batch_size, micro_batch_size, dp_size)
    numbers = np.arange(first_sample, first_sample + global_batch_size, dtype=np.int64)
    return numbers.reshape(-1, dp_size, micro_batch_size)[:, dp_rank]


class GlobalBatchLoader:
    """Yields the steps from `consumed_samples` on, each read before it is asked for.

    batch_size_at   global batch size once so many samples are consumed (ramp-up)
    prefetch        global batches read ahead; at most prefetch + 1 are held
    An error while reading is raised, as it was, by the `next()` that needed the batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        seed: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        batch_size_at: Callable[[int], int],
        consumed_samples: int = 0,
        prefetch: int = 2,
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._batch_size_at = batch_size_at
        self._next_sample = consumed_samples
        self._prefetch = prefetch
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="batch-reader")
        self._pending: deque[Future[GlobalBatch]] = deque()
        self._read_ahead(prefetch)

    def __iter__(self) -> GlobalBatchLoader:
        return self

    def __next__(self) -> GlobalBatch:
        self._read_ahead(self._prefetch + 1)
        return self._pending.popleft().result()

    def read(self, first_sample: int, global_batch_size: int) -> GlobalBatch:
        """This rank's share of any step, read now, in the calling thread."""
        numbers = sample_numbers(
            first_sample, global_batch_size, self._micro_batch_size, self._dp_rank, self._dp_size
        )
        micro_batches = tuple(self._read_micro_batch(numbers_B) for numbers_B in numbers)
        return GlobalBatch(first_sample, global_batch_size, micro_batches)

    def close(self) -> None:
        """Stop reading ahead and wait for the batch that is being read."""
        self._pending.clear()
        self._reader.shutdown(cancel_futures=True)

    def _read_ahead(self, num_batches: int) -> None:
        while len(self._pending) < num_batches:
            size = self._batch_size_at(self._next_sample)
            self._pending.append(self._reader.submit(self.read, self._next_sample, size))
            self._next_sample += size

    def _read_micro_batch(self, numbers_B: NDArray[np.int64]) -> MicroBatch:
        _, indices_B = sample_index(numbers_B, len(self.dataset), self._seed)
        samples = [self.dataset[int(index)] for index in indices_B]
        return MicroBatch(
            tokens_BS=np.stack([sample.tokens_S for sample in samples]),
            labels_BS=np.stack([sample.labels_S for sample in samples]),
            loss_mask_BS=np.stack([sample.loss_mask_S for sample in samples]),
            sample_numbers_B=numbers_B,
        )
