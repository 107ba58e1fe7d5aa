"""How many nodes to keep warm, and what recovery costs when none is left (MegaScale 4.2).

Nodes fail independently and come back after `repair_s`, so that the number of nodes away at a time
is Poisson with mean N r repair (the law of an M/G/infinity queue: it needs the mean of the repair
time and nothing else of it). A pool of S spares is empty when more than S are away.

ByteRobust (2509.16293, 6) sizes its standbys by the 99th percentile of a day's binomial; with a
repair time of a day the two agree to the Poisson limit of the binomial.
"""

from __future__ import annotations

import math

from megascale.plan.effects.failures import DAY_S
from megascale.plan.effects.interval import check_count, check_number


def away(num_nodes: int, failures_per_node_day: float, repair_s: float) -> float:
    """Mean number of nodes that are being repaired."""
    check_count("num_nodes", num_nodes)
    check_number("failures_per_node_day", failures_per_node_day, least=0.0)
    check_number("repair_s", repair_s, least=0.0)
    return num_nodes * failures_per_node_day * repair_s / DAY_S


def exhausted(num_spares: int, mean_away: float) -> float:
    """Chance that a failing node finds no spare: that `num_spares` or more are away already."""
    check_count("num_spares", num_spares, least=0)
    return 1.0 - _poisson_cdf(num_spares - 1, mean_away)


def spares_for(
    num_nodes: int,
    failures_per_node_day: float,
    repair_s: float = DAY_S,
    *,
    quantile: float = 0.99,
) -> int:
    """Least number of spares that with chance `quantile` covers all nodes that are away."""
    check_number("quantile", quantile, least=0.0, most=0.999999, above=True)
    mean = away(num_nodes, failures_per_node_day, repair_s)
    num_spares = 0
    while _poisson_cdf(num_spares, mean) < quantile:
        num_spares += 1
    return num_spares


def recovery_with_spares_s(
    num_spares: int, mean_away: float, recovery_s: float, replenish_s: float
) -> float:
    """Mean recovery: `recovery_s` onto a spare, `replenish_s` more where there is none.

    replenish_s  until the scheduler has another machine, which passed its self-check
    """
    check_number("recovery_s", recovery_s, least=0.0)
    check_number("replenish_s", replenish_s, least=0.0)
    return recovery_s + exhausted(num_spares, mean_away) * replenish_s


def _poisson_cdf(most: int, mean: float) -> float:
    """P(X <= most). Terms in logarithms: a mean of thousands must not underflow."""
    if mean == 0.0:
        return 1.0 if most >= 0 else 0.0
    log_mean = math.log(mean)
    terms = (math.exp(k * log_mean - mean - math.lgamma(k + 1)) for k in range(most + 1))
    return min(1.0, math.fsum(terms))
