"""What validation is held to, line by line, beside what the best public predictor reaches.

A public bar is Calculon's (SC'23), run with its shipped A100 file on the same rows, or what a paper
prints; none of them is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megascale.plan.validate.campaign import Campaign, Group
from megascale.plan.validate.scores import Predicted, by_job, regret, scores, trend, trend_error

VTRAIN = ("vtrain, fitted", "vtrain, held out")
_IN_VIEW = "two numbers of a100.toml assumed with Table 3 in view"


@dataclass(frozen=True)
class Target:
    """One line.

    value   what was reached: fractions; for Table 3 points of MFU; of a trend its standard errors
    limit   at most this
    bar     the public one, as text
    fitted  what of it was fitted
    """

    name: str
    value: float
    limit: float
    unit: str
    bar: str
    fitted: str

    @property
    def met(self) -> bool:
        return self.value <= self.limit


def targets(campaign: Campaign) -> list[Target]:
    """The lines whose rows are at hand."""
    return [
        *_korthikanti(campaign),
        *_vtrain(campaign),
        *_table2(campaign),
        *_table3(campaign.table3),
        *_fig9(campaign),
        *_own(campaign),
    ]


def _korthikanti(campaign: Campaign) -> Iterator[Target]:
    rows = [
        p
        for name in ("korthikanti, fitted", "korthikanti, held out")
        for p in _rows(campaign, name)
        if p.row.case.layout.data == 1
    ]
    found = scores(rows)
    fitted = "three numbers of the A100, on 4 of the 8 rows"
    yield Target("Korthikanti, 8 rows, mean", found.mean, 0.025, "share", "3.65 %", fitted)
    yield Target("Korthikanti, 8 rows, worst", abs(found.worst), 0.06, "share", "8.87 %", fitted)


def _vtrain(campaign: Campaign) -> Iterator[Target]:
    rows = [p for name in VTRAIN for p in _rows(campaign, name)]
    if not rows:
        return
    fitted = "three numbers of the A100, on two of the four models"
    bar = "11.1 % (103 rows)"
    yield Target("vTrain, 109 rows, mean", scores(rows).mean, 0.07, "share", bar, fitted)
    bars = {"GPT-3.6B": "0.0 %", "GPT-18.4B": "4.5 %", "GPT-39.1B": "0.0 %", "GPT-175B": "0.6 %"}
    for of_job in by_job(rows).values():
        model = of_job[0].row.model
        yield Target(
            f"vTrain, {model}, regret", regret(of_job), 0.02, "share", bars.get(model, ""), fitted
        )


def _table2(campaign: Campaign) -> Iterator[Target]:
    one = f"seconds a step, on these 8 rows; {_IN_VIEW}"
    rows = _rows(campaign, "table2, megatron-lm")
    baseline = scores(rows)
    bar = "6.2 %; 2.3 % with one constant"
    yield Target("Table 2, Megatron-LM, mean", baseline.mean, 0.022, "share", bar, one)
    yield Target("Table 2, Megatron-LM, trend", *_trend(rows), "errors of it", "", one)
    rows = _rows(campaign, "table2, megascale")
    system = scores(rows)
    bar = "9.9 %; 3.1 % with the same constant"
    none = f"nothing on these rows; {_IN_VIEW}"
    yield Target("Table 2, MegaScale, mean", system.mean, 0.028, "share", bar, none)
    yield Target("Table 2, MegaScale, worst", abs(system.worst), 0.065, "share", "16.0 %", none)
    yield Target("Table 2, MegaScale, trend", *_trend(rows), "errors of it", "", none)


def _trend(rows: Sequence[Predicted]) -> tuple[float, float]:
    """The slope of the errors by size in standard errors, and the most that chance would make: the
    two-sided 95 % point of Student's t for six degrees of freedom."""
    assert len(rows) == 8, len(rows)
    gpus, errors = [p.row.gpus for p in rows], [p.error for p in rows]
    slope = trend(gpus, errors)
    assert slope is not None
    return abs(slope) / trend_error(gpus, errors), 2.447


def _table3(rungs: Sequence[Predicted]) -> Iterator[Target]:
    none = f"nothing on these rows; {_IN_VIEW}"
    for below, rung in pairwise(rungs):
        off = abs((rung.mfu - below.mfu) - (rung.measured_mfu - below.measured_mfu))
        name = f"Table 3, {rung.row.label}, points off"
        yield Target(name, 100 * off, 0.7, "points", "none does it", none)
    predicted = rungs[-1].mfu - rungs[0].mfu
    measured = rungs[-1].measured_mfu - rungs[0].measured_mfu
    yield Target(
        "Table 3, sum, points off",
        100 * abs(predicted - measured),
        1.0,
        "points",
        "none does it",
        none,
    )


def _fig9(campaign: Campaign) -> Iterator[Target]:
    rows = [p for name in ("fig9, megatron-lm", "fig9, megascale") for p in _rows(campaign, name)]
    none = "nothing on these rows"
    yield Target("Figure 9, 530B, mean", scores(rows).mean, 0.05, "share", "", none)


def _own(campaign: Campaign) -> Iterator[Target]:
    rows = _rows(campaign, "own")
    if not rows:
        return
    found = scores(rows)
    calibrated = "no step: the H200's file is measured, kernel by kernel"
    bar = "SimuMax: 4.8 % on 8 B200"
    yield Target("own H200 runs, mean", found.mean, 0.03, "share", bar, calibrated)
    yield Target("own H200 runs, worst", abs(found.worst), 0.08, "share", "11.4 %", calibrated)
    yield Target("own H200 runs, regret", found.regret or 0.0, 0.02, "share", "", calibrated)
    errors = [abs(check.error) for check in campaign.memory]
    seen = "two assumptions, on the rows of two devices; nothing on those of one"
    mean = sum(errors) / len(errors)
    yield Target("own H200 runs, peak memory, mean", mean, 0.01, "share", "0.5 %", seen)
    yield Target("own H200 runs, peak memory, worst", max(errors), 0.01, "share", "0.5 %", seen)


def _rows(campaign: Campaign, name: str) -> Sequence[Predicted]:
    group: Group | None = campaign.group(name)
    return group.predicted if group else ()


SHOWN: dict[str, Callable[[float], str]] = {
    "share": lambda value: f"{100 * value:.2f} %",
    "points": lambda value: f"{value:.2f}",
    "errors of it": lambda value: f"{value:.2f}",
}
