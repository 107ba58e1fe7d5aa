"""From data position to micro-batches (MegaScale 3.4): what one data-parallel rank trains on.

A step is (first global sample number, global batch size). Its micro-batch j on data rank r holds

    first + (j * dp_size + r) * micro_batch_size + [0, micro_batch_size)

so any layout trains a step on the same samples, and resuming needs the one number `consumed`. A
thread reads ahead while the accelerator computes; the order is known, so nothing is sent to it.

MegaScale's two-layer tree, one reader a node and ranks that copy from shared memory, is another
`BatchSource` (`data/node/`): it replaces who reads, never which samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megascale.data.mixture import SampleOrder
from megascale.data.samples import Sample


@dataclass(frozen=True)
class MicroBatch:
    """B samples of S positions; `sample_numbers_B` counts from the start of training.

    windows_BW          W = S + 1 tokens: position s is predicted from those up to s
    document_starts_BS  position in the sample where the token's document starts; None where tokens
                        attend to all before them
    """

    windows_BW: NDArray[np.int32]
    loss_mask_BS: NDArray[np.bool_]
    sample_numbers_B: NDArray[np.int64]
    document_starts_BS: NDArray[np.int32] | None = None

    @property
    def tokens_BS(self) -> NDArray[np.int64]:
        return self.windows_BW[:, :-1].astype(np.int64)

    @property
    def labels_BS(self) -> NDArray[np.int64]:
        return self.windows_BW[:, 1:].astype(np.int64)


@dataclass(frozen=True)
class GlobalBatch:
    """One step's position, and this data rank's share of it in the order of execution."""

    first_sample: int
    num_samples: int
    micro_batches: tuple[MicroBatch, ...]


class BatchSource(Protocol):
    """What the training loop needs of a loader: it blocks in `__next__`, which never ends."""

    def __next__(self) -> GlobalBatch: ...

    def is_ready(self) -> bool:
        """Whether `__next__` would return, or raise, without waiting."""

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
        order: SampleOrder,
        *,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        batch_size_at: Callable[[int], int],
        consumed_samples: int = 0,
        prefetch: int = 2,
    ) -> None:
        self._order = order
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

    def is_ready(self) -> bool:
        return bool(self._pending) and self._pending[0].done()

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
        samples = [self._order.sample(int(number)) for number in numbers_B]
        starts_B = [s.document_starts_S for s in samples if s.document_starts_S is not None]
        return MicroBatch(
            windows_BW=np.stack([window(sample) for sample in samples]),
            loss_mask_BS=np.stack([sample.loss_mask_S != 0 for sample in samples]),
            sample_numbers_B=numbers_B,
            document_starts_BS=np.stack(starts_B) if starts_B else None,
        )


def window(sample: Sample) -> NDArray[np.int32]:
    """The S + 1 tokens of which a sample's tokens and labels are views."""
    tokens_W = np.empty(len(sample.tokens_S) + 1, np.int32)
    tokens_W[:-1] = sample.tokens_S
    tokens_W[-1] = sample.labels_S[-1]
    return tokens_W
