"""Sizes of a pool of spares, against hand-computed Poisson tails and ByteRobust's table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.spares import away, exhausted, recovery_with_spares_s, spares_for


def test_nodes_away() -> None:
    assert away(1000, 3e-3, 43200.0) == pytest.approx(1.5)


def test_an_empty_pool_by_hand() -> None:
    mean = 1.5
    assert exhausted(0, mean) == 1.0
    assert exhausted(2, mean) == pytest.approx(1 - math.exp(-1.5) * (1 + 1.5))
    assert exhausted(3, 0.0) == 0.0
    assert exhausted(3000, 2000.0) == pytest.approx(0.0, abs=1e-9)  # no underflow


def test_spares_by_simulation() -> None:
    """Nodes fail at random and are away for a day: the pool covers 99 % of the moments."""
    nodes, rate = 512, 1.5e-3
    found = spares_for(nodes, rate)
    rng = np.random.default_rng(0)
    failed = rng.binomial(nodes, rate, 100_000)
    assert np.mean(failed <= found) >= 0.99
    assert np.mean(failed <= found - 1) < 0.99


def test_byterobusts_standbys() -> None:
    """2, 2, 3, 4 machines at 128, 256, 512, 1,024: one daily rate gives all four."""
    assert [spares_for(nodes, 1.2e-3) for nodes in (128, 256, 512, 1024)] == [2, 2, 3, 4]


def test_recovery_waits_only_where_no_spare_is_left() -> None:
    assert recovery_with_spares_s(0, 1.0, 60.0, 500.0) == 560.0
    assert recovery_with_spares_s(50, 1.0, 60.0, 500.0) == pytest.approx(60.0)
    assert recovery_with_spares_s(1, 0.5, 60.0, 500.0) == pytest.approx(
        60.0 + 500.0 * (1 - math.exp(-0.5))
    )


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="num_spares is -1"):
        exhausted(-1, 1.0)
    with pytest.raises(ConfigError, match="quantile is 1; legal is more than 0, at most"):
        spares_for(8, 1e-3, quantile=1.0)
    with pytest.raises(ConfigError, match="repair_s is -1"):
        away(8, 1e-3, -1.0)
