"""The order of training: which sample is number n, as a pure function of n (MegaScale 3.4).

`SampleOrder.sample(n)` is all that a loader asks of the data, whoever loads and in whatever layout:
data position is the one number n, and resuming is continuing to count. `ShuffledSamples` is one
data set, epoch after epoch, each in an order of its own (`shuffle.py`).
"""

from __future__ import annotations

from typing import Protocol

from megascale.data.samples import Dataset, Sample
from megascale.data.shuffle import sample_index


class SampleOrder(Protocol):
    """Samples numbered from the start of training, without end; all of `seq_len` positions.

    Two processes that open the same data with the same seed give the same sample for a number.
    """

    seq_len: int
    vocab_size: int

    def sample(self, number: int) -> Sample: ...


class ShuffledSamples:
    """One data set: every epoch visits each sample once."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset = dataset
        self.seq_len, self.vocab_size = dataset.seq_len, dataset.vocab_size
        self._seed = seed

    def sample(self, number: int) -> Sample:
        return self.dataset[self.index(number)]

    def index(self, number: int) -> int:
        """Which sample of the data set is number `number`."""
        _, index = sample_index(number, len(self.dataset), self._seed)
        return int(index)
