"""Goodput: the share of a job's time that is new training, where nodes fail (MegaScale 4.4, 6.3).

`expected_ettr` is the formula of Kokolis et al. (2410.21680): with N nodes that fail r times a
node-day, recovery u, a save every D seconds that stalls w,

    ETTR = (1 - N r (u + D / 2)) / (1 + w / D)

First order: it counts failures by the wall clock and lets each cost half an interval, so that it is
wrong, and too low, where u + D / 2 comes near to the time between failures. `exact` has no such
limit: the renewal argument for exponential failures (Daly 2006), in which a segment of D + w
seconds is repeated until one passes, and nothing fails while the job recovers:

    ETTR = D / ((1 / f + u) (exp(f (D + w)) - 1)),   f = N r

`simulate_ettr` draws the process that `exact` describes; the tests hold them together. The interval
to save at is Young's sqrt(2 w MTBF) (1974), or Daly's, which subtracts w and adds two orders.

u + D / 2: the paper's "within 15 minutes" may already hold the lost work; then D / 2 is counted
twice, and `lost_work_in_recovery` leaves it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megascale.plan.effects.interval import Interval, check_count, check_number, interval_of

DAY_S = 86400.0
_Z95 = 1.6448536269514722  # 95th percentile of the normal distribution

# Failures a node-day of eight GPUs. RSC-1 and RSC-2: Kokolis et al. 2410.21680; llama3: 419
# unexpected interruptions in 54 days on 2,048 nodes (2407.21783, table 5).
FAILURES_PER_NODE_DAY = {"rsc-2": 2.34e-3, "llama3": 3.79e-3, "rsc-1": 6.50e-3}


@dataclass(frozen=True)
class Ettr:
    """Expected share of the time that makes progress, and what it follows from.

    value      first order (Kokolis); 0 where the formula goes below it
    exact      by renewal, for exponential failures
    low, high  5th and 95th percentile of a job of `days`: failures are few and random
    """

    value: float
    interval_s: float
    mtbf_s: float
    low: float
    high: float
    exact: float


def mtbf_s(num_nodes: int, failures_per_node_day: float) -> float:
    """Seconds between failures of a job on `num_nodes`; infinite where nothing fails."""
    check_count("num_nodes", num_nodes)
    check_number("failures_per_node_day", failures_per_node_day, least=0.0)
    rate = num_nodes * failures_per_node_day
    return DAY_S / rate if rate else math.inf


def young_interval_s(mtbf: float, checkpoint_stall_s: float) -> float:
    """First order of the interval with the least loss (Young 1974)."""
    return math.sqrt(2.0 * checkpoint_stall_s * mtbf)


def daly_interval_s(mtbf: float, checkpoint_stall_s: float) -> float:
    """Higher order of the same (Daly 2006, equation 37); the MTBF where a save takes twice it."""
    if checkpoint_stall_s >= 2.0 * mtbf:
        return mtbf
    ratio = checkpoint_stall_s / (2.0 * mtbf)
    series = 1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0
    return young_interval_s(mtbf, checkpoint_stall_s) * series - checkpoint_stall_s


def expected_ettr(
    num_nodes: int,
    failures_per_node_day: float,
    recovery_s: float,
    checkpoint_stall_s: float,
    interval_s: float | None = None,
    *,
    days: float = 30.0,
    lost_work_in_recovery: bool = False,
) -> Ettr:
    """ETTR of a job; `interval_s` None takes Young's. Raises ConfigError on what is not legal."""
    check_number("recovery_s", recovery_s, least=0.0)
    check_number("checkpoint_stall_s", checkpoint_stall_s, least=0.0)
    check_number("days", days, least=0.0, above=True)
    mtbf = mtbf_s(num_nodes, failures_per_node_day)
    if interval_s is None and (mtbf == math.inf or checkpoint_stall_s == 0.0):
        # saving is free, or never needed: the limit of the formula at its best interval
        interval = 0.0 if checkpoint_stall_s == 0.0 else math.inf
        stall_share = 0.0
    else:
        young = young_interval_s(mtbf, checkpoint_stall_s)
        interval = young if interval_s is None else interval_s
        check_number("interval_s", interval, least=0.0, above=True)
        stall_share = checkpoint_stall_s / interval
    lost_s = 0.0 if lost_work_in_recovery or interval == math.inf else interval / 2.0
    cost_s = recovery_s + lost_s
    first_order = (1.0 - cost_s / mtbf) / (1.0 + stall_share)
    # failures are a compound Poisson process: variance of the lost time is rate x E[cost^2]
    second = cost_s**2 + (2.0 * lost_s) ** 2 / 12.0
    spread = _Z95 * math.sqrt(second / (mtbf * days * DAY_S)) / (1.0 + stall_share)
    return Ettr(
        value=max(0.0, first_order),
        interval_s=interval,
        mtbf_s=mtbf,
        low=max(0.0, first_order - spread),
        high=min(1.0 / (1.0 + stall_share), max(0.0, first_order + spread)),
        exact=_by_renewal(mtbf, recovery_s, checkpoint_stall_s, interval),
    )


def _by_renewal(mtbf: float, recovery_s: float, stall_s: float, interval_s: float) -> float:
    if mtbf == math.inf:
        return 1.0 if interval_s in (0.0, math.inf) else interval_s / (interval_s + stall_s)
    if interval_s == 0.0:
        return mtbf / (mtbf + recovery_s)
    exponent = (interval_s + stall_s) / mtbf
    if exponent > 700.0:  # no segment ever passes
        return 0.0
    return interval_s / ((mtbf + recovery_s) * math.expm1(exponent))


def simulate_ettr(
    num_nodes: int,
    failures_per_node_day: float,
    recovery_s: float,
    checkpoint_stall_s: float,
    interval_s: float,
    *,
    seed: int,
    days: float = 30.0,
    num_jobs: int = 200,
) -> Interval:
    """The Monte Carlo twin: `num_jobs` jobs of `days`, exponential failures, saves every interval.

    A failure loses what came after the last save, recovery comes after it, and nothing fails in it.
    """
    check_count("num_jobs", num_jobs)
    check_number("interval_s", interval_s, least=0.0, above=True)
    mtbf = mtbf_s(num_nodes, failures_per_node_day)
    period_s, whole_s = interval_s + checkpoint_stall_s, days * DAY_S
    if mtbf == math.inf:
        share = interval_s / period_s
        return Interval(share, share, share)
    rng = np.random.default_rng(seed)
    expected = int(whole_s / (mtbf + recovery_s)) + 1
    num_draws = expected + 10 * int(math.sqrt(expected)) + 20  # more failures than any job has
    lived = rng.exponential(mtbf, (num_jobs, num_draws))
    ends = np.cumsum(lived + recovery_s, axis=1)
    starts = np.concatenate([np.zeros((num_jobs, 1)), ends[:, :-1]], axis=1)
    assert float(ends[:, -1].min()) > whole_s, "too few failures were drawn"
    lasted = np.clip(whole_s - starts, 0.0, lived)  # what of it lies within the job
    saved = np.floor(lasted / period_s) * interval_s
    return interval_of(saved.sum(axis=1) / whole_s)


@dataclass(frozen=True)
class Recovery:
    """Seconds from a fault to the first step that nobody had done before, without the lost work.

    detect_s   until the driver has decided what it is and whom it names
    check_s    self-checks of the nodes
    restart_s  processes, groups, assembly, first step
    load_s     state from a neighbour's memory or from storage
    """

    detect_s: float
    check_s: float
    restart_s: float
    load_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("detect_s", "check_s", "restart_s", "load_s"):
            check_number(name, getattr(self, name), least=0.0)

    @property
    def total_s(self) -> float:
        return self.detect_s + self.check_s + self.restart_s + self.load_s

    def at_scale(self, *, groups_s: float, load_s: float) -> Recovery:
        """With the creation of a large world's groups and the loading of a large model's state."""
        return Recovery(
            self.detect_s, self.check_s, self.restart_s + groups_s, self.load_s + load_s
        )


RecoveryKind = Literal["paper", "rank_killed", "hang", "node_lost"]

# Measured on two CPU cores with small models, medians over the faults of a kind in the matrix of
# faults (docs/reliability.md): kill, segv, abort, exit_code; sigstop, skip_collective, gil, sleep;
# node_lost, partition (its self-check is in restart_s). A large model adds `load_s`, a large world
# the creation of its groups (`initialisation.py`): they are no prediction by themselves.
# The paper: under 10 minutes to detect and diagnose, within 15 to catch up (6.3).
RECOVERY: dict[RecoveryKind, Recovery] = {
    "paper": Recovery(detect_s=600.0, check_s=0.0, restart_s=900.0),
    "rank_killed": Recovery(detect_s=0.1, check_s=3.7, restart_s=2.0),
    "hang": Recovery(detect_s=12.1, check_s=3.6, restart_s=1.6),
    "node_lost": Recovery(detect_s=12.3, check_s=0.0, restart_s=3.8),
}
