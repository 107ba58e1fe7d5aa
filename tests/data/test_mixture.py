"""The order of samples as a pure function of the sample's number; shares of a mixture, exact."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.data.mixture import Mixture, ShuffledSamples, shares_of
from megascale.data.samples import Sample
from megascale.data.shuffle import sample_index
from megascale.errors import DataError

_SEED = 5


class Numbered:
    """Sample i is the number base + i everywhere."""

    seq_len = 4
    vocab_size = 1 << 40

    def __init__(self, num_samples: int, base: int = 0) -> None:
        self._num_samples, self._base = num_samples, base

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self._num_samples
        tokens = np.full(self.seq_len, self._base + index, np.int64)
        return Sample(tokens, tokens, np.ones(self.seq_len, np.float32))


_weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7)


def _mixture(weights: list[float], size: int = 1000, seed: int = _SEED) -> Mixture:
    return Mixture([Numbered(size, 1000 * k) for k in range(len(weights))], weights, seed)


def test_one_data_set_is_in_the_order_of_its_shuffle() -> None:
    order = ShuffledSamples(Numbered(37), _SEED)
    numbers = np.arange(200)
    _, expected = sample_index(numbers, 37, _SEED)
    assert [int(order.sample(int(n)).tokens_S[0]) for n in numbers] == expected.tolist()
    assert (order.seq_len, order.vocab_size) == (4, 1 << 40)


@given(weights=_weights, num_blocks=st.integers(0, 1 << 40))
@settings(max_examples=200, deadline=None)
def test_behind_every_block_each_part_is_within_a_sample_of_its_share(
    weights: list[float], num_blocks: int
) -> None:
    mixture = _mixture(weights)
    counts = mixture.counts(num_blocks)
    assert sum(counts) == num_blocks * mixture.block
    for count, share in zip(counts, mixture.shares, strict=True):
        assert abs(count - share * num_blocks * mixture.block) <= 1
    grown = mixture.counts(num_blocks + 1)
    assert all(b >= a for a, b in zip(counts, grown, strict=True)), "monotone"
    assert sum(mixture.shares) == 1
    exact = [Fraction(repr(weight)) for weight in weights]
    assert mixture.shares == [weight / sum(exact) for weight in exact]


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1.0], [5.0, 0.004, 1.0], [0.1] * 10])
@pytest.mark.parametrize("first_block", [0, 3, 10**9])
def test_a_block_continues_every_part_where_the_blocks_before_left_it(
    weights: list[float], first_block: int
) -> None:
    mixture = _mixture(weights)
    before, behind = mixture.counts(first_block), mixture.counts(first_block + 1)
    first = first_block * mixture.block
    seen: list[list[int]] = [[] for _ in weights]
    for number in range(first, first + mixture.block):
        part, number_in_part = mixture.place(number)
        seen[part].append(number_in_part)
    for numbers, start, stop in zip(seen, before, behind, strict=True):
        assert sorted(numbers) == list(range(start, stop))
        assert len(numbers) < 50 or numbers != sorted(numbers), "the order inside is a permutation"


def test_an_epoch_of_a_part_visits_each_of_its_samples_once() -> None:
    sizes, weights = [100, 37, 2000], [0.5, 0.25, 0.25]
    mixture = Mixture([Numbered(size, 10_000 * k) for k, size in enumerate(sizes)], weights, _SEED)
    by_part: list[dict[int, int]] = [{} for _ in sizes]
    for number in range(2 * mixture.block):
        part, number_in_part = mixture.place(number)
        token = int(mixture.sample(number).tokens_S[0])
        assert token // 10_000 == part
        by_part[part][number_in_part] = token - 10_000 * part
    for size, weight, samples in zip(sizes, weights, by_part, strict=True):
        assert sorted(samples) == list(range(int(weight * 2 * mixture.block)))
        epochs = [[samples[e * size + i] for i in range(size)] for e in range(len(samples) // size)]
        assert len(epochs) >= 1
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert size == 2000 or epochs[0] != epochs[1], "an order of its own"


@given(weights=_weights, start=st.integers(0, 1 << 50), seed=st.integers(0, 1 << 31))
@settings(max_examples=30, deadline=None)
def test_any_number_gives_its_sample_without_those_before(
    weights: list[float], start: int, seed: int
) -> None:
    running, resumed = _mixture(weights, seed=seed), _mixture(weights, seed=seed)
    for number in range(max(0, start - 5), start):
        running.sample(number)
    for number in range(start, start + 5):
        assert running.place(number) == resumed.place(number)
        assert running.sample(number).tokens_S[0] == resumed.sample(number).tokens_S[0]


def test_seeds_and_parts_have_orders_of_their_own() -> None:
    mixture, other = _mixture([1.0, 1.0]), _mixture([1.0, 1.0], seed=_SEED + 1)
    assert mixture.parts[0].index(0) != mixture.parts[1].index(0)
    places = [[m.place(n)[0] for n in range(100)] for m in (mixture, other)]
    assert places[0] != places[1]


def test_parts_are_mixed_evenly_inside_a_block() -> None:
    """Of 64 numbers anywhere, a part has its share give or take what chance gives."""
    mixture = _mixture([0.75, 0.25])
    for first in range(0, 2 * mixture.block, 64):
        count = sum(mixture.place(n)[0] == 0 for n in range(first, first + 64))
        assert abs(count - 48) <= 6 * math.sqrt(64 * 0.75 * 0.25)


@pytest.mark.parametrize(("share", "block"), [(0.5, 4096), (1 / 4096, 4096), (1e-4, 16384)])
def test_a_block_holds_a_sample_of_the_smallest_share(share: float, block: int) -> None:
    mixture = _mixture([1 - share, share])
    assert mixture.block == block
    counts = [mixture.counts(m)[1] for m in range(50)]
    assert np.abs(np.diff(counts) - share * block).max() <= 2


def test_weights_are_what_is_written() -> None:
    assert shares_of([0.7, 0.2, 0.1]) == [Fraction(7, 10), Fraction(1, 5), Fraction(1, 10)]
    assert shares_of([3, 1]) == [Fraction(3, 4), Fraction(1, 4)]
    assert shares_of([1e308, 1e308]) == [Fraction(1, 2)] * 2


def test_a_share_that_no_block_can_meet_is_refused() -> None:
    with pytest.raises(DataError, match=r"smallest weight of data.mixture is 1\.0e-12 of all"):
        _mixture([1.0, 1e-12])
