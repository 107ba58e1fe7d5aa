"""Scores of predictions, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.plan.case import Layout
from megascale.plan.validate.published import korthikanti_rows
from megascale.plan.validate.scores import (
    Predicted,
    by_job,
    order,
    regret,
    scores,
    trend,
    trend_error,
)


def _predicted(measured_s: float, seconds: float, tensor: int = 8) -> Predicted:
    row = korthikanti_rows()[1]
    case = replace(row.case, layout=Layout(tensor=tensor, data=8 // tensor))
    return Predicted(replace(row, case=case, measured_s=measured_s), seconds)


def test_errors_are_predicted_over_measured() -> None:
    found = scores([_predicted(2.0, 1.9), _predicted(2.0, 2.2, tensor=4)])
    assert found.count == 2
    assert found.mean == pytest.approx(0.075)
    assert found.worst == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.025)


def test_the_trend_is_the_slope_for_each_doubling() -> None:
    assert trend([8, 16, 32], [0.01, 0.03, 0.05]) == pytest.approx(0.02)
    assert trend([8, 8], [0.1, 0.2]) is None


def test_the_error_of_a_trend_is_that_of_a_straight_line() -> None:
    # residuals of 1, -2, 1 hundredths about a level line: sqrt((6e-4 / 1) / 2)
    assert trend_error([8, 16, 32], [0.01, -0.02, 0.01]) == pytest.approx((6e-4 / 2) ** 0.5)


def test_regret_is_what_the_favourite_costs_more_than_the_fastest() -> None:
    jobs = [_predicted(10.0, 9.0, 8), _predicted(9.5, 9.2, 4), _predicted(12.0, 11.0, 2)]
    assert regret(jobs) == pytest.approx(10.0 / 9.5 - 1)
    assert order(jobs) == (2, 3)  # the first two are the wrong way round
    tied = [_predicted(10.0, 9.0, 8), _predicted(10.02, 8.0, 4)]
    assert order(tied) == (0, 0)  # 0.2 % apart: no order to be right about


def test_rows_of_other_jobs_are_not_compared() -> None:
    rows = [Predicted(row, row.measured_s) for row in korthikanti_rows()]
    assert all(len(of_job) == 1 for of_job in by_job(rows).values() if of_job[0].row.gpus > 280)
    one, other = (_predicted(1.0, 1.0, 8), _predicted(2.0, 2.0, 4))
    assert len(by_job([one, other])) == 1
