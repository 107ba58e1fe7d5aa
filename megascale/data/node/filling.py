"""What the loader of a node does with one ring: reads batch after batch, a sample at a time.

Written without a process around it, so that tests run it in a thread, and a loader of two rings
(training and validation) turns from one to the other between samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import numpy as np

from megascale.data.loader import sample_numbers
from megascale.data.mixture import SampleOrder
from megascale.data.node.ring import Ring, Share, stamp
from megascale.data.samples import Sample
from megascale.errors import MegascaleError

# (first sample number, samples, data set of these numbers) of batch after batch
Positions = Iterator[tuple[int, int, int]]


def training_positions(batch_size_at: Callable[[int], int], first_sample: int) -> Positions:
    """The steps of a run from `first_sample` on, without end."""
    while True:
        size = batch_size_at(first_sample)
        yield first_sample, size, 0
        first_sample += size


def validation_positions(num_batches: Sequence[int], batch_size: int) -> Positions:
    """The same batches at every validation, over and over: `num_batches` of each part."""
    return cycle(
        (i * batch_size, batch_size, part)
        for part, num in enumerate(num_batches)
        for i in range(num)
    )


class Filler:
    """Keeps `ring` full of the batches at `positions`, of the samples of `orders`."""

    def __init__(self, ring: Ring, orders: Sequence[SampleOrder]) -> None:
        self._ring, self._orders = ring, orders
        self._order = orders[0]
        self._generation = 0
        self._positions: Positions = iter(())
        self._batch = 0
        self._rows: Iterator[tuple[Share, int]] | None = None  # left of the batch under way
        self._num_rows = 0
        self._has_failed = False

    def begin(self, generation: int, positions: Positions) -> None:
        """Read from another position; what was under way is void."""
        assert generation > self._generation, (generation, self._generation)
        self._generation, self._positions = generation, positions
        self._batch, self._rows, self._has_failed = 0, None, False

    def advance(self) -> bool:
        """Read one sample, if there is room for its batch; False where there is nothing to do.

        A sample that cannot be read ends this generation: the ranks are told which batch it is of.
        """
        if self._generation == 0 or self._has_failed:
            return False
        if self._rows is None and not self._start_batch():
            return False
        assert self._rows is not None
        row = next(self._rows, None)
        if row is None:
            self._ring.publish(self._generation, self._batch, self._num_rows)
            self._batch += 1
            self._rows = None
            return True
        share, number = row
        self._ring.alive(number)
        try:
            write_sample(self._order.sample(number), share)
        except MegascaleError as error:
            self._has_failed = True
            failed = stamp(self._generation, self._batch)
            self._ring.fail(failed, str(error), error.exit_code)
        return True

    def _start_batch(self) -> bool:
        if not self._ring.may_fill(self._generation, self._batch):
            return False
        position = next(self._positions, None)
        if position is None:
            return False
        shape = self._ring.shape
        slot = self._batch % shape.num_slots
        first, size, part = position
        self._order = self._orders[part]
        numbers = [
            sample_numbers(first, size, shape.micro_batch_size, dp_rank, shape.dp_size).ravel()
            for dp_rank in shape.dp_ranks
        ]
        self._num_rows = len(numbers[0])
        assert self._num_rows <= shape.num_rows, (position, shape)
        shares = [self._ring.share(slot, i) for i in range(len(numbers))]
        self._rows = (
            (_row(share, row), int(number))
            for share, of_share in zip(shares, numbers, strict=True)
            for row, number in enumerate(of_share)
        )
        return True


def _row(share: Share, row: int) -> Share:
    documents = None if share.documents_RS is None else share.documents_RS[row : row + 1]
    return Share(share.windows_RW[row : row + 1], share.mask_bits_RM[row : row + 1], documents)


def write_sample(sample: Sample, row: Share) -> None:
    """Tokens, the last label, mask and document starts into a row of a share."""
    window_W = row.windows_RW[0]
    window_W[:-1] = sample.tokens_S
    window_W[-1] = sample.labels_S[-1]
    row.mask_bits_RM[0] = np.packbits(sample.loss_mask_S != 0)
    if row.documents_RS is not None:
        assert sample.document_starts_S is not None, "documents are masked, starts are missing"
        row.documents_RS[0] = sample.document_starts_S
