"""Ranks that launch late: what a step's first global collective waits for (MegaScale 6.3).

The paper's falling MFU: forward, backward and optimizer took as long as ever, but some ranks
launched their reduce-scatter late, because Python collected garbage when it liked and slow host
code stood in the way. Each rank pauses in a step with a small chance; the collective waits for the
last of all ranks, so that the loss grows with their number although no rank got slower.

Model: in a step a rank pauses with chance c, exponentially with mean u, independently. The latest
of n ranks, in closed form,

    E[max] = u (sum of (1 - (1 - c)^j) / j for j from 1 to n),   P(max <= x) = (1 - c e^(-x/u))^n

A planned collection (the paper's cure) pauses all ranks in the same step, every 1/c steps: the mean
of a step is then c E[max of n pauses], c u (1 + 1/2 + ... + 1/n). That the offsets also grow with
the steps, as the paper saw, is not modelled: here ranks meet in every step.
"""

from __future__ import annotations

import math

import numpy as np

from megascale.plan.effects.interval import Interval, check_count, check_number

# Chosen, not measured: a full collection of a trainer's objects every 100 steps or so.
PAUSE_CHANCE = 0.01
PAUSE_S = 0.1


def launch_skew(
    num_ranks: int,
    *,
    chance: float = PAUSE_CHANCE,
    pause_s: float = PAUSE_S,
    planned: bool = False,
) -> Interval:
    """Seconds that a step waits for its latest rank; exact mean and 5th to 95th percentile: of
    steps, but of a planned collection of its periods (nearly all steps have none).

    planned  all ranks pause in the same steps, one in 1 / chance

    Where more than 95 of 100 steps wait for nobody (few ranks), the upper end is the mean.
    """
    check_count("num_ranks", num_ranks)
    check_number("chance", chance, least=0.0, most=1.0)
    check_number("pause_s", pause_s, least=0.0)
    if chance == 0.0 or pause_s == 0.0:
        return Interval(0.0, 0.0, 0.0)
    j = np.arange(1, num_ranks + 1)
    if planned:
        mean = chance * pause_s * float(np.sum(1.0 / j))
        low, high = (chance * _quantile(q, num_ranks, 1.0, pause_s) for q in (0.05, 0.95))
    else:
        mean = pause_s * float(np.sum(-np.expm1(j * _log1m(chance)) / j))
        low, high = (_quantile(q, num_ranks, chance, pause_s) for q in (0.05, 0.95))
    return Interval(mean, low, max(high, mean))


def _log1m(chance: float) -> float:
    return math.log1p(-chance) if chance < 1.0 else -math.inf


def _quantile(share: float, num_ranks: int, chance: float, pause_s: float) -> float:
    """x with (1 - c e^(-x/u))^n = share; 0 where nobody pauses with a larger chance."""
    late = -math.expm1(math.log(share) / num_ranks)
    return max(0.0, -pause_s * math.log(late / chance))
