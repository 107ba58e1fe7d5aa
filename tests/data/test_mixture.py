"""The order of samples as a pure function of the sample's number."""

from __future__ import annotations

import numpy as np

from megascale.data.mixture import ShuffledSamples
from megascale.data.samples import Sample
from megascale.data.shuffle import sample_index

_SEED = 5


class Numbered:
    """Sample i is the number i everywhere."""

    seq_len = 4
    vocab_size = 1 << 20

    def __init__(self, num_samples: int, base: int = 0) -> None:
        self._num_samples, self._base = num_samples, base

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self._num_samples
        tokens = np.full(self.seq_len, self._base + index, np.int64)
        return Sample(tokens, tokens, np.ones(self.seq_len, np.float32))


def test_one_data_set_is_in_the_order_of_its_shuffle() -> None:
    order = ShuffledSamples(Numbered(37), _SEED)
    numbers = np.arange(200)
    _, expected = sample_index(numbers, 37, _SEED)
    assert [int(order.sample(int(n)).tokens_S[0]) for n in numbers] == expected.tolist()
    assert (order.seq_len, order.vocab_size) == (4, 1 << 20)
