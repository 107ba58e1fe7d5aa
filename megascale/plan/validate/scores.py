"""How good predictions are: mean, worst and bias of errors, trend with size, order and regret.

Errors are predicted over measured less one, so that a negative one is optimistic. A planner
chooses, therefore two scores of choice stand beside the errors: of two measured layouts of one job,
how often the faster is predicted to be it (ties of less than 0.5 % measured do not count), and how
much slower than the fastest measured layout the predicted favourite was (regret).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import log2

import numpy as np

from megascale.plan.validate.rows import Row

TIE = 0.005


@dataclass(frozen=True)
class Predicted:
    """A row and what was predicted for it."""

    row: Row
    seconds: float

    @property
    def error(self) -> float:
        return self.seconds / self.row.measured_s - 1.0

    @property
    def mfu(self) -> float:
        return self.row.mfu_of(self.seconds)

    @property
    def measured_mfu(self) -> float:
        return self.row.mfu_of(self.row.measured_s)


@dataclass(frozen=True)
class Scores:
    """Of a list of predictions; all but `count` are fractions.

    trend   of the error for each doubling of devices, by least squares; None: one size alone
    order   share of pairs in the right order; None: no two layouts of one job
    regret  worst of the jobs that were measured in several layouts
    """

    count: int
    mean: float
    worst: float
    bias: float
    trend: float | None
    order: float | None
    regret: float | None


def scores(predicted: Sequence[Predicted]) -> Scores:
    """Of at least one prediction."""
    assert predicted, "nothing was predicted"
    errors = np.array([p.error for p in predicted])
    jobs = [of_job for of_job in by_job(predicted).values() if len(of_job) > 1]
    right, pairs = (sum(part) for part in zip(*map(order, jobs), strict=True)) if jobs else (0, 0)
    return Scores(
        count=len(predicted),
        mean=float(np.abs(errors).mean()),
        worst=float(errors[np.abs(errors).argmax()]),
        bias=float(errors.mean()),
        trend=trend([p.row.gpus for p in predicted], errors.tolist()),
        order=right / pairs if pairs else None,
        regret=max(map(regret, jobs)) if jobs else None,
    )


def trend(gpus: Sequence[int], errors: Sequence[float]) -> float | None:
    """Least-squares slope of the error against log2 of the number of devices."""
    if len(set(gpus)) < 2:
        return None
    return float(np.polyfit([log2(n) for n in gpus], errors, 1)[0])


def trend_error(gpus: Sequence[int], errors: Sequence[float]) -> float:
    """Standard error of `trend`, of rows that scatter about it independently; at least three."""
    x = np.log2(np.asarray(gpus, dtype=float))
    slope, offset = np.polyfit(x, errors, 1)
    left = np.asarray(errors) - slope * x - offset
    scatter = (left**2).sum() / (len(errors) - 2)
    return float(np.sqrt(scatter / ((x - x.mean()) ** 2).sum()))


def by_job(predicted: Sequence[Predicted]) -> dict[Hashable, list[Predicted]]:
    """Rows that do the same work on as many devices of the same cluster, in different layouts."""
    found: dict[Hashable, list[Predicted]] = defaultdict(list)
    for p in predicted:
        job, cluster = p.row.case.job, p.row.cluster
        key = p.row.set, p.row.system, job.model.model_dump_json(), job.seq_len
        found[(*key, job.global_batch_size, job.optimizer, p.row.gpus, cluster.name)].append(p)
    return found


def order(predicted: Sequence[Predicted]) -> tuple[int, int]:
    """(pairs in the right order, pairs) of one job."""
    right = pairs = 0
    for one, other in combinations(predicted, 2):
        measured = one.row.measured_s / other.row.measured_s - 1.0
        if abs(measured) < TIE:
            continue
        pairs += 1
        right += (measured > 0) == (one.seconds > other.seconds)
    return right, pairs


def regret(predicted: Sequence[Predicted]) -> float:
    """How much slower than the fastest measured layout of a job the predicted favourite is."""
    favourite = min(predicted, key=lambda p: p.seconds)
    fastest_s = min(p.row.measured_s for p in predicted)
    return favourite.row.measured_s / fastest_s - 1.0
