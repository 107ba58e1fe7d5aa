"""Hash conflicts against closed forms, exhaustive counting, and a table made by two programs."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.ecmp import (
    Uplinks,
    fullest_cdf,
    simulate,
    slowed_probability,
    slowest_flow,
)

# flows, rate of a flow, queue pairs; slowest, mean, share of slowed flows. 32 uplinks of 400G,
# ports split where a flow has 200G, half or three quarters of the edges under the switch where the
# 64 flows are 32 or 16. Two independent programs of 4,000 draws agreed on it within 0.005.
TABLE = [
    (32, 400.0, 1, 0.295, 0.637, 0.627),
    (64, 200.0, 1, 0.381, 0.734, 0.590),
    (16, 400.0, 1, 0.444, 0.798, 0.376),
    (32, 200.0, 1, 0.591, 0.902, 0.254),
    (16, 200.0, 1, 0.869, 0.971, 0.081),
    (64, 200.0, 4, 0.676, 0.863, None),
    (64, 200.0, 16, 0.877, 0.931, None),
]


def _uplinks(flow_gbps: float, queue_pairs: int = 1) -> Uplinks:
    return Uplinks(32, 400.0, flow_gbps, queue_pairs)


@pytest.mark.parametrize(("flows", "gbps", "pairs", "slowest", "mean", "slowed"), TABLE)
def test_the_table(
    flows: int, gbps: float, pairs: int, slowest: float, mean: float, slowed: float | None
) -> None:
    found = simulate(_uplinks(gbps, pairs), flows, seed=7, num_trials=12_000)
    assert found.slowest.value == pytest.approx(slowest, abs=0.006)
    assert found.mean == pytest.approx(mean, abs=0.005)
    assert found.slowest.low <= found.slowest.value <= found.slowest.high
    if slowed is None:
        assert found.slowed > 0.95
    else:
        assert found.slowed == pytest.approx(slowed, abs=0.006)
        assert slowed_probability(_uplinks(gbps), flows) == pytest.approx(slowed, abs=0.006)


@pytest.mark.parametrize(("flows", "gbps", "pairs", "slowest"), [row[:4] for row in TABLE])
def test_the_slowest_flow_by_its_closed_form(
    flows: int, gbps: float, pairs: int, slowest: float
) -> None:
    found = slowest_flow(_uplinks(gbps, pairs), {flows: 1}, seed=3)
    assert found.value == pytest.approx(slowest, abs=0.006)
    assert found.low <= found.value <= found.high


def test_chances_by_hand() -> None:
    assert slowed_probability(_uplinks(400.0), 32) == pytest.approx(1 - (31 / 32) ** 31)
    two = 1 - (31 / 32) ** 63 - 63 / 32 * (31 / 32) ** 62
    assert slowed_probability(_uplinks(200.0), 64) == pytest.approx(two)
    assert slowed_probability(_uplinks(400.0), 1) == 0.0
    assert slowed_probability(Uplinks(4, 100.0, 200.0), 1) == 1.0  # an uplink below a flow


def test_the_fullest_link_by_counting_all_hashes() -> None:
    flows, links = 5, 3
    fullest = [max(np.bincount(hashes)) for hashes in itertools.product(range(links), repeat=flows)]
    counted = [sum(f <= most for f in fullest) / links**flows for most in range(flows + 1)]
    assert fullest_cdf(flows, links) == pytest.approx(tuple(counted), abs=1e-12)


def test_many_flows_do_not_overflow() -> None:
    cdf = fullest_cdf(320, 50)
    assert cdf[6] == pytest.approx(0.0, abs=1e-9)  # 320 flows on 50 links: some link has 7
    assert all(a <= b for a, b in itertools.pairwise(cdf))
    assert cdf[-1] == 1.0


def test_more_switches_have_a_slower_slowest_flow() -> None:
    """By closed form, and by the least of several draws."""
    uplinks = _uplinks(200.0)
    one, many = (slowest_flow(uplinks, {64: n}).value for n in (1, 100))
    assert many < one
    draws = simulate(uplinks, 64, seed=11, num_trials=8000)
    assert draws.slowest.value == pytest.approx(one, abs=0.005)
    pairs = _uplinks(200.0, 4)
    few, more = (slowest_flow(pairs, {64: n}, seed=1) for n in (1, 8))
    assert more.value < few.low + 0.05
    assert more.value < few.value


def test_switches_of_several_loads_are_as_slow_as_their_fullest_at_least() -> None:
    uplinks = _uplinks(200.0)
    both = slowest_flow(uplinks, {64: 1, 16: 1}).value
    assert both <= slowest_flow(uplinks, {64: 1}).value
    assert both > slowest_flow(uplinks, {64: 2}).value


def test_what_stays_under_a_switch_meets_nobody() -> None:
    assert slowest_flow(_uplinks(200.0), {0: 24}).value == 1.0
    assert slowest_flow(_uplinks(200.0), {1: 24}).value == 1.0
    assert slowest_flow(_uplinks(200.0), {}).value == 1.0


def test_queue_pairs_help_more_than_the_split() -> None:
    """0.295 -> 0.381 by the split, -> 0.676 and 0.877 by 4 and 16 queue pairs."""
    plain, split = slowest_flow(_uplinks(400.0), {32: 1}), slowest_flow(_uplinks(200.0), {64: 1})
    four, sixteen = (slowest_flow(_uplinks(200.0, q), {64: 1}) for q in (4, 16))
    assert plain.value < split.value < four.value < sixteen.value
    assert four.value - split.value > 2 * (split.value - plain.value)


def test_a_seed_repeats() -> None:
    first, again, other = (simulate(_uplinks(200.0, 4), 64, seed=s) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 400.0, 200.0), "uplinks of a switch is 0; legal is a whole number, 1 or more"),
        ((32, 0.0, 200.0), "bandwidth of an uplink in Gb/s is 0; legal is more than 0"),
        ((32, 400.0, float("inf")), "bandwidth of a flow in Gb/s is inf"),
        ((32, 400.0, 200.0, 0), "queue pairs is 0"),
    ],
)
def test_bad_input(arguments: tuple[int, float, float], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        Uplinks(*arguments)


def test_bad_counts() -> None:
    with pytest.raises(ConfigError, match="flows of a switch is -1"):
        slowest_flow(_uplinks(200.0), {-1: 1})
    with pytest.raises(ConfigError, match="num_flows is 0"):
        simulate(_uplinks(200.0), 0, seed=0)


@pytest.mark.parametrize(
    ("flows", "mean", "low", "high"),
    [
        # 8 links: 2 flows meet in 1 draw of 8
        (2, 1 - 0.5 / 8, 0.5, 1.0),
        # of 5, by counting all 8^5: apart 0.205, two meet 0.667, three 0.120, four or all 0.009
        (5, 0.205 + 0.667 / 2 + 0.120 / 3 + 0.009 / 4, 1 / 3, 1.0),
    ],
)
def test_the_interval_is_from_the_5th_to_the_95th_percentile(
    flows: int, mean: float, low: float, high: float
) -> None:
    found = slowest_flow(Uplinks(8, 400.0, 400.0), {flows: 1})
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.value == pytest.approx(mean, abs=1e-3)
