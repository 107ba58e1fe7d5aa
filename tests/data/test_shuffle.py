"""The shuffle is a permutation, differs by seed and epoch, and never changes between versions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.data.shuffle import permute, permute_one, sample_index


@given(
    n=st.integers(1, 5000),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(n), n, seed, epoch)
    assert sorted(order.tolist()) == list(range(n))


@given(
    n=st.integers(2**20, 2**50),
    positions=st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=50, unique=True),
)
@settings(max_examples=30, deadline=None)
def test_large_sets_stay_in_range_and_never_repeat(n: int, positions: list[int]) -> None:
    image = permute(positions, n, 7, 3)
    assert image.min() >= 0
    assert image.max() < n
    assert len(set(image.tolist())) == len(positions)


@given(n=st.integers(64, 2000), seed=st.integers(0, 1000), epoch=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_epochs_and_seeds_differ(n: int, seed: int, epoch: int) -> None:
    here = permute(np.arange(n), n, seed, epoch)
    assert not np.array_equal(here, permute(np.arange(n), n, seed, epoch + 1))
    assert not np.array_equal(here, permute(np.arange(n), n, seed + 1, epoch))


def test_arrays_equal_single_positions() -> None:
    whole = permute(np.arange(12).reshape(3, 4), 12, 5, 2)
    assert whole.shape == (3, 4)
    assert whole.reshape(-1).tolist() == [int(permute(i, 12, 5, 2)) for i in range(12)]


@given(
    n=st.integers(1, 2**50),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**40),
    share=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=200, deadline=None)
def test_numbers_and_arrays_are_permuted_alike(n: int, seed: int, epoch: int, share: float) -> None:
    index = min(n - 1, int(share * n))
    assert permute_one(index, n, seed, epoch) == int(permute([index], n, seed, epoch)[0])


def test_each_position_is_close_to_uniform() -> None:
    n, epochs = 16, 8000
    firsts = permute(np.full(epochs, 3), n, 11, np.arange(epochs))
    counts = np.bincount(firsts, minlength=n)
    chi_square = float(((counts - epochs / n) ** 2 / (epochs / n)).sum())
    assert chi_square < 37.7  # 15 degrees of freedom, p = 0.001


def test_pairs_of_positions_are_close_to_uniform() -> None:
    n, epochs = 16, np.arange(24_000)
    first, second = permute(0, n, 5, epochs), permute(1, n, 5, epochs)
    counts = np.bincount(first * n + second, minlength=n * n).reshape(n, n)
    expected = len(epochs) / (n * (n - 1))
    off_diagonal = counts[~np.eye(n, dtype=bool)]
    chi_square = float(((off_diagonal - expected) ** 2 / expected).sum())
    assert chi_square < 312  # 239 degrees of freedom, p = 0.001


def test_neighbours_are_spread() -> None:
    n = 100_000
    order = permute(np.arange(n), n, 1, 0)
    correlation = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(correlation) < 0.02


def test_the_order_is_pinned() -> None:
    """A change here changes what every stored run would read after a resume."""
    assert permute(np.arange(10), 10, 1234, 0).tolist() == [1, 8, 7, 0, 2, 9, 4, 6, 5, 3]
    assert permute(np.arange(10), 10, 1234, 1).tolist() == [2, 4, 9, 1, 0, 6, 7, 3, 5, 8]
    assert int(permute(123_456, 10**9, 42, 7)) == 902_943_228


def test_sample_numbers_count_through_epochs() -> None:
    n, seed = 7, 3
    epochs, indices = sample_index(np.arange(3 * n), n, seed)
    assert epochs.tolist() == [0] * n + [1] * n + [2] * n
    expected = [int(permute(i, n, seed, epoch)) for epoch in range(3) for i in range(n)]
    assert indices.tolist() == expected


@pytest.mark.parametrize("index", [-1, 5])
def test_positions_outside_are_a_defect(index: int) -> None:
    with pytest.raises(AssertionError):
        permute(index, 5, 0, 0)
    with pytest.raises(AssertionError):
        permute_one(index, 5, 0, 0)
