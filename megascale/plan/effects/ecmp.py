"""Hash conflicts on a switch's uplinks: what the slowest flow of a ring still gets (MegaScale 3.6).

ECMP sends each connection over one uplink, chosen by a hash, for as long as the connection lives.
Uplinks together carry everything that comes up (1:1), but not as the hash deals it out: where more
flows meet on one link than it carries, they share it, and a ring runs at its slowest flow. What
helps, and is a parameter here: ports split, so that an uplink carries two flows at full rate and a
conflict needs three; placement, so that fewer flows leave the switch at all; several queue pairs
a connection, each with its own hash, whose sum is nearer to the mean.

Model: the flows that leave a switch at one time choose uplinks uniformly and independently; flows
on a link share it in proportion. A flow of several queue pairs is the sum of them: its data is
dealt out as each gets on. Only the way up is modelled; the way down is another draw of the same
law, and where it is to count, the number of switches is doubled.

Closed forms where there are any, exact: the chance that a flow is slowed, a binomial tail; and the
slowest flow of one queue pair each, by the law of the fullest of k cells,
P(max <= j) = f! / k^f [x^f] (sum of x^i / i! for i <= j)^k. Monte Carlo for the rest, seeded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megascale.plan.effects.interval import Interval, check_count, check_number, interval_of

NUM_TRIALS = 4000
_BATCH = 2_000_000  # connections drawn at once: 16 MB


@dataclass(frozen=True)
class Uplinks:
    """The uplinks of one switch, and the flows that hash onto them.

    queue_pairs  that one flow is split over, each with a hash of its own
    """

    num_links: int
    link_gbps: float
    flow_gbps: float
    queue_pairs: int = 1

    def __post_init__(self) -> None:
        check_count("uplinks of a switch", self.num_links)
        check_count("queue pairs", self.queue_pairs)
        check_number("bandwidth of an uplink in Gb/s", self.link_gbps, least=0.0, above=True)
        check_number("bandwidth of a flow in Gb/s", self.flow_gbps, least=0.0, above=True)

    @property
    def room(self) -> float:
        """Flows at full rate that an uplink carries."""
        return self.link_gbps / self.flow_gbps


@dataclass(frozen=True)
class Shares:
    """Shares of its full rate that a flow gets.

    slowest  of all flows in a draw: what a ring through all of them runs at
    mean     over flows and draws
    slowed   share of the flows that get less than their full rate
    """

    slowest: Interval
    mean: float
    slowed: float


def slowed_probability(uplinks: Uplinks, num_flows: int) -> float:
    """Chance that a flow of one queue pair meets more flows than its uplink carries.

    Equal rates: 1 - (1 - 1/k)^(f - 1). Ports split in two: P[Bin(f - 1, 1/k) >= 2].
    """
    check_count("num_flows", num_flows)
    others, chance = num_flows - 1, 1.0 / uplinks.num_links
    fits = math.floor(uplinks.room + 1e-9) - 1  # others that a link carries beside this one
    if fits < 0:
        return 1.0
    kept = sum(
        math.comb(others, i) * chance**i * (1.0 - chance) ** (others - i)
        for i in range(min(fits, others) + 1)
    )
    return max(0.0, 1.0 - kept)


@lru_cache(maxsize=4096)
def fullest_cdf(num_flows: int, num_links: int) -> tuple[float, ...]:
    """P(no link has more than j flows), for j from 0 to `num_flows`; exact."""
    log_factorials = np.array([math.lgamma(i + 1) for i in range(num_flows + 1)])
    found = [1.0 if num_flows == 0 else 0.0]
    for most in range(1, num_flows + 1):
        if found[-1] == 1.0:
            found.append(1.0)
            continue
        log_one = np.full(num_flows + 1, -np.inf)
        log_one[: most + 1] = -log_factorials[: most + 1]
        log_all = _log_power(log_one, num_links)
        log_chance = log_all[-1] + log_factorials[-1] - num_flows * math.log(num_links)
        chance = math.exp(log_chance)
        found.append(1.0 if chance > 1.0 - 1e-12 else max(found[-1], chance))
    return tuple(found)


def _log_power(log_coefficients: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    """Logarithms of a polynomial's coefficients to the power, by squaring, cut at its length."""
    result: NDArray[np.float64] | None = None
    while exponent:
        if exponent & 1:
            result = log_coefficients if result is None else _log_times(result, log_coefficients)
        exponent >>= 1
        if exponent:
            log_coefficients = _log_times(log_coefficients, log_coefficients)
    assert result is not None, "the exponent is at least 1"
    return result


def _log_times(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Product of two polynomials in logarithms: factorials of hundreds are beyond a float."""
    length = len(left)
    rows, columns = np.arange(length)[:, None], np.arange(length)[None, :]
    terms = np.where(columns <= rows, left[columns] + right[rows - columns], -np.inf)
    return np.asarray(np.logaddexp.reduce(terms, axis=1), dtype=np.float64)


def slowest_flow(
    uplinks: Uplinks,
    switches: Mapping[int, int],
    *,
    seed: int = 0,
    num_trials: int = NUM_TRIALS,
) -> Interval:
    """Share that the slowest flow gets, of all flows that leave any of several switches at a time.

    switches   flows that leave a switch -> number of such switches (of rails, of pods)
    Exact for one queue pair; drawn with `seed` for more. No flows: 1.
    """
    for num_flows, count in switches.items():
        check_count("flows of a switch", num_flows, least=0)
        check_count("number of switches", count, least=0)
    loaded = {flows: count for flows, count in switches.items() if flows and count}
    if not loaded:
        return Interval(1.0, 1.0, 1.0)
    if uplinks.queue_pairs == 1:
        return _slowest_exact(uplinks, loaded)
    draws = {flows: _draw(uplinks, flows, seed, num_trials).min(axis=1) for flows in loaded}
    return _slowest_of_draws(draws, loaded)


def _slowest_exact(uplinks: Uplinks, switches: Mapping[int, int]) -> Interval:
    """The fullest link of all switches is at most j full with the product of the chances."""
    most = max(switches)
    chance = np.ones(most + 1)
    for flows, count in switches.items():
        cdf = np.ones(most + 1)
        cdf[: flows + 1] = fullest_cdf(flows, uplinks.num_links)
        chance *= cdf**count
    share = np.minimum(1.0, uplinks.room / np.maximum(np.arange(most + 1), 1e-9))
    return _interval(share, np.diff(chance, prepend=0.0))


def _slowest_of_draws(
    draws: Mapping[int, NDArray[np.float64]], switches: Mapping[int, int]
) -> Interval:
    """Least of several independent draws: the chance to be above x is the product of theirs."""
    values = np.unique(np.concatenate(list(draws.values())))
    above = np.ones(len(values))
    for flows, count in switches.items():
        ordered = np.sort(draws[flows])
        below = np.searchsorted(ordered, values, side="right") / len(ordered)
        above *= (1.0 - below) ** count
    return _interval(values, np.diff(1.0 - above, prepend=0.0))


def _interval(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Interval:
    order = np.argsort(values, kind="stable")
    values, below = values[order], np.cumsum(weights[order])
    marks = np.searchsorted(below, np.array([0.05, 0.95])).clip(max=len(values) - 1)
    low, high = values[marks]
    return Interval(float(values @ weights[order]), float(low), float(high))


def simulate(
    uplinks: Uplinks, num_flows: int, *, seed: int, num_trials: int = NUM_TRIALS
) -> Shares:
    """Draw the hash of every flow of one switch `num_trials` times."""
    check_count("num_flows", num_flows)
    check_count("num_trials", num_trials)
    share = _draw(uplinks, num_flows, seed, num_trials)
    slowed = float(np.mean(share < 1.0 - 1e-9))
    return Shares(interval_of(share.min(axis=1)), float(share.mean()), slowed)


def _draw(uplinks: Uplinks, num_flows: int, seed: int, num_trials: int) -> NDArray[np.float64]:
    """Share of each flow in each trial, (num_trials, num_flows)."""
    rng = np.random.default_rng((seed, num_flows))
    pairs = num_flows * uplinks.queue_pairs
    rows = max(1, _BATCH // pairs)
    parts = [
        _draw_rows(uplinks, num_flows, rng, min(rows, num_trials - first))
        for first in range(0, num_trials, rows)
    ]
    return np.concatenate(parts)


def _draw_rows(
    uplinks: Uplinks, num_flows: int, rng: np.random.Generator, rows: int
) -> NDArray[np.float64]:
    links, pairs = uplinks.num_links, num_flows * uplinks.queue_pairs
    chosen = rng.integers(links, size=(rows, pairs)) + np.arange(rows)[:, None] * links
    load = np.bincount(chosen.ravel(), minlength=rows * links) / uplinks.queue_pairs
    share = np.minimum(1.0, uplinks.room / load[chosen])
    return np.asarray(share.reshape(rows, num_flows, uplinks.queue_pairs).mean(axis=2))
