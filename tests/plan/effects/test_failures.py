"""ETTR against the published formula's table, its exact form, and a simulation of the process."""

from __future__ import annotations

import math

import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.failures import (
    RECOVERY,
    Recovery,
    daly_interval_s,
    expected_ettr,
    mtbf_s,
    simulate_ettr,
    young_interval_s,
)

NODES = 1536  # 12,288 GPUs


# failures a node-day, MTBF h, best interval min, ETTR at it, at 30 min, with slow recovery;
# computed by hand from the formula of 2410.21680: recovery 25 min, stall 5 s; slow: 60 min, 300 s
TABLE = [
    (2.34e-3, 6.7, 8.2, 0.918, 0.898, 0.715),
    (3.79e-3, 4.1, 6.4, 0.875, 0.836, 0.597),
    (6.50e-3, 2.4, 4.9, 0.796, 0.721, 0.400),
]


@pytest.mark.parametrize(("rate", "mtbf_h", "best_min", "best", "at_30", "slow"), TABLE)
def test_the_table(
    rate: float, mtbf_h: float, best_min: float, best: float, at_30: float, slow: float
) -> None:
    found = expected_ettr(NODES, rate, 1500.0, 5.0)
    assert found.mtbf_s / 3600 == pytest.approx(mtbf_h, abs=0.05)
    assert found.interval_s / 60 == pytest.approx(best_min, abs=0.05)
    assert found.value == pytest.approx(best, abs=5e-4)
    assert expected_ettr(NODES, rate, 1500.0, 5.0, 1800.0).value == pytest.approx(at_30, abs=5e-4)
    assert expected_ettr(NODES, rate, 3600.0, 300.0).value == pytest.approx(slow, abs=5e-4)


def test_llama3_mean_time_between_interruptions() -> None:
    """419 unexpected interruptions of 2,048 nodes in 54 days: one in 3.09 hours."""
    assert mtbf_s(2048, 419 / 54 / 2048) / 3600 == pytest.approx(3.09, abs=0.005)


def test_young_and_daly() -> None:
    assert young_interval_s(20_000.0, 9.0) == pytest.approx(600.0)
    # sqrt(2 w M) (1 + sqrt(w / 2M) / 3 + w / 18 M) - w, with w / 2M = 0.0225 / 100
    assert daly_interval_s(20_000.0, 9.0) == pytest.approx(600 * 1.005025 - 9, abs=1e-6)
    assert daly_interval_s(100.0, 200.0) == 100.0


def test_young_is_the_best_interval_of_the_formula_and_daly_of_the_exact_form() -> None:
    rate, stall = 3.79e-3, 60.0
    mtbf = mtbf_s(NODES, rate)
    young = expected_ettr(NODES, rate, 600.0, stall)
    daly = expected_ettr(NODES, rate, 600.0, stall, daly_interval_s(mtbf, stall))
    for factor in (0.8, 1.25):
        other = expected_ettr(NODES, rate, 600.0, stall, daly.interval_s * factor)
        assert other.exact < daly.exact
    assert daly.exact > young.exact
    near = [expected_ettr(NODES, rate, 0.0, stall, young.interval_s * f).value for f in (0.7, 1.4)]
    assert max(near) < expected_ettr(NODES, rate, 0.0, stall).value


@pytest.mark.parametrize("rate", [2.34e-3, 6.5e-3])
def test_a_simulated_job_agrees_with_the_exact_form(rate: float) -> None:
    found = expected_ettr(NODES, rate, 1500.0, 60.0, 1200.0, days=60)
    drawn = simulate_ettr(NODES, rate, 1500.0, 60.0, 1200.0, seed=1, days=60, num_jobs=400)
    assert drawn.value == pytest.approx(found.exact, abs=0.004)
    assert drawn.low < found.exact < drawn.high


def test_the_range_is_that_of_simulated_jobs() -> None:
    found = expected_ettr(NODES, 2.34e-3, 600.0, 5.0, 600.0, days=30)
    drawn = simulate_ettr(NODES, 2.34e-3, 600.0, 5.0, 600.0, seed=3, days=30, num_jobs=2000)
    assert found.high - found.low == pytest.approx(drawn.high - drawn.low, rel=0.12)
    assert found.value == pytest.approx(drawn.value, abs=0.004)


def test_longer_jobs_are_surer() -> None:
    short, long = (expected_ettr(NODES, 3e-3, 900.0, 5.0, days=days) for days in (1.0, 100.0))
    assert short.value == long.value
    assert short.high - short.low > 5 * (long.high - long.low)
    assert 0.0 <= short.low <= short.value <= short.high <= 1.0


def test_where_nothing_fails_or_saving_is_free() -> None:
    never = expected_ettr(NODES, 0.0, 600.0, 5.0)
    assert (never.value, never.exact, never.interval_s) == (1.0, 1.0, math.inf)
    paid = expected_ettr(NODES, 0.0, 600.0, 5.0, 95.0)
    assert (paid.value, paid.exact) == pytest.approx((0.95, 0.95))
    free = expected_ettr(NODES, 3e-3, 600.0, 0.0)
    assert free.interval_s == 0.0
    assert free.value == pytest.approx(1 - 600 / free.mtbf_s)
    assert free.exact == pytest.approx(free.mtbf_s / (free.mtbf_s + 600))


def test_a_job_that_cannot_live_has_no_progress() -> None:
    found = expected_ettr(100_000, 6.5e-3, 3600.0, 300.0, 7200.0)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)
    assert 0.0 <= found.exact < 1e-6


def test_lost_work_is_counted_once_where_recovery_holds_it() -> None:
    twice = expected_ettr(NODES, 3e-3, 1500.0, 5.0, 1800.0)
    once = expected_ettr(NODES, 3e-3, 1500.0, 5.0, 1800.0, lost_work_in_recovery=True)
    assert once.value - twice.value == pytest.approx(900 / twice.mtbf_s / (1 + 5 / 1800))


def test_measured_recoveries() -> None:
    assert RECOVERY["paper"].total_s == 25 * 60
    assert RECOVERY["rank_killed"].total_s == pytest.approx(5.8)
    assert RECOVERY["hang"].total_s == pytest.approx(17.3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1e-3, 1.0, 1.0), "num_nodes is 0; legal is a whole number, 1 or more"),
        ((8, -1e-3, 1.0, 1.0), "failures_per_node_day is -0.001; legal is 0 or more"),
        ((8, math.nan, 1.0, 1.0), "failures_per_node_day is nan"),
        ((8, 1e-3, -1.0, 1.0), "recovery_s is -1"),
        ((8, 1e-3, 1.0, -1.0), "checkpoint_stall_s is -1"),
        ((8, 1e-3, 1.0, 1.0, -5.0), "interval_s is -5; legal is more than 0"),
        ((8, 1e-3, 1.0, 1.0, 0.0), "interval_s is 0; legal is more than 0"),
    ],
)
def test_bad_input(arguments: tuple[float, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        expected_ettr(*arguments)  # type: ignore[arg-type]


def test_bad_recovery() -> None:
    with pytest.raises(ConfigError, match="check_s is -1; legal is 0 or more"):
        Recovery(1.0, -1.0, 1.0)
