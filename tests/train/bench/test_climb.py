"""Climbing: order, value checks, rungs that fail, and what the table says."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megascale.errors import LaunchError, NumericalError
from megascale.train.bench.case import Case
from megascale.train.bench.climb import Climb, climb, table
from megascale.train.bench.measure import Run, check_losses, check_same
from megascale.train.bench.rows import Origin, Row, ladder_row
from megascale.train.launch import StoppedError
from tests.train.bench.planted import FIRST_LOSS, PP2, TP2, plan_tiny, planted_run

Measure = Callable[[Case], Run]
NOWHERE = Origin({"dirty": True}, on_gpus=False)
ALL = [
    *("baseline", "parallel block", "sliding window", "TP overlap", "PP overlap"),
    *("efficient operators", "misc", "LAMB 3x batch"),
]


def _climb(folder: Path, measure: Measure, rounds: int = 1) -> tuple[Climb, list[str]]:
    found = Climb(plan_tiny(folder, TP2, PP2, num_ranks=4))
    said: list[str] = []

    def make_row(plan: Any, runs: Any, below: Any) -> Row:
        return ladder_row(plan, plan.case, runs, below, NOWHERE)

    climb(found, rounds, measure=measure, make_row=make_row, say=said.append)
    return found, said


def _name(case: Case) -> str:
    """Which rung of the whole ladder the case is."""
    if case.switches["optimizer"] == "lamb":
        return ALL[7]
    if case.switches["host"] == "ahead":
        return ALL[6]
    if case.switches["operators"] == "fused":
        return ALL[5]
    if case.switches["transfers"] == "decoupled":
        return ALL[4]
    if case.keys["flux"] == "auto":
        return ALL[3]
    if case.switches["window"]:
        return ALL[2]
    return ALL[1] if case.keys["block"] == "parallel" else ALL[0]


def _planted(**changes: dict[str, float]) -> Measure:
    """Runs that are right; rungs of `changes` (by first word) have a run with those changes."""

    def measure(case: Case) -> Run:
        return planted_run(case, **changes.get(_name(case).split()[0], {}))

    return measure


def test_gains_are_over_the_rung_before_and_their_sum_over_the_baseline(tmp_path: Path) -> None:
    found, _ = _climb(tmp_path, _planted(baseline={"step_s": 0.2}, LAMB={"step_s": 0.16}))
    assert list(found.rows) == ALL
    assert not found.failed
    values = [row["value"] for row in found.rows.values()]
    assert values == pytest.approx([0.2, *[0.4] * 6, 0.25])
    gains = [row["gain"] for row in found.rows.values()]
    assert gains[0] is None
    assert gains[1:] == pytest.approx([0.2, *[0.0] * 5, -0.15])
    sums = [row["sum_of_gains"] for row in found.rows.values()]
    assert sums == pytest.approx([0.0, *[0.2] * 6, 0.05])
    lamb = found.rows["LAMB 3x batch"]
    assert lamb["over"] == "misc"
    assert lamb["speedup"] == pytest.approx(3 * 0.1 / 0.16), "throughput counts the larger batch"
    assert lamb["total_speedup"] == pytest.approx(3 * 0.2 / 0.16)
    assert lamb["case"] == {
        "model": "tiny",
        "tp": 2,
        "pp": 2,
        "vp": 1,
        "dp": 1,
        "mbs": 1,
        "gbs": 12,
        "seq": 16,
        "block": "parallel",
        "attention": "window",
        "recompute": "none",
        "flux": "auto",
        "window": 6,
        "transfers": "decoupled",
        "dp_overlap": "none",
        "operators": "fused",
        "host": "ahead",
        "optimizer": "lamb",
        "rung": "LAMB 3x batch",
    }


def test_rounds_go_through_the_ladder_in_turns_and_give_their_median(tmp_path: Path) -> None:
    order: list[str] = []
    seconds = iter([*[0.1] * 8, *[0.4] * 8, *[0.2] * 8])

    def measure(case: Case) -> Run:
        order.append(_name(case))
        return planted_run(case, step_s=next(seconds))

    found, _ = _climb(tmp_path, measure, rounds=3)
    assert order == ALL * 3
    assert {row["step_s"] for row in found.rows.values()} == {0.2}
    assert found.rows["baseline"]["stats"] == {"runs": 3, "rounds": 3, "min": 0.1, "max": 0.4}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"loss": FIRST_LOSS * 1.0001}, "the loss of step 1 is"),
        ({"norm": 1.001}, "the norm of the first gradient is 1.001, and 1 in 'sliding window'"),
        ({"norm": math.nan}, "the norm of the first gradient is nan"),
    ],
)
def test_a_rung_of_the_same_mathematics_must_have_the_same_losses(
    tmp_path: Path, changes: dict[str, float], complaint: str
) -> None:
    found, said = _climb(tmp_path, _planted(TP=changes))
    assert list(found.rows) == [name for name in ALL if name != "TP overlap"]
    assert complaint in found.failed["TP overlap"]
    assert "no row is written" in found.failed["TP overlap"]
    assert any(complaint in line for line in said)
    assert found.rows["PP overlap"]["over"] == "sliding window"


def test_a_rung_of_other_mathematics_may_have_other_losses(tmp_path: Path) -> None:
    found, _ = _climb(tmp_path, _planted(parallel={"loss": FIRST_LOSS * 1.002, "norm": 2.0}))
    assert not found.failed


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [(FIRST_LOSS * 1.006, "the first loss is 5.58"), (math.nan, "not every loss is finite: nan")],
)
def test_any_rung_must_begin_at_what_untrained_weights_cost(
    tmp_path: Path, loss: float, complaint: str
) -> None:
    found, _ = _climb(tmp_path, _planted(LAMB={"loss": loss}))
    assert list(found.rows) == ALL[:-1]
    assert complaint in found.failed["LAMB 3x batch"]


def test_a_later_round_must_compute_what_the_first_did(tmp_path: Path) -> None:
    norms = iter([1.0] * 9 + [1.1] + [1.0] * 6)
    found, _ = _climb(tmp_path, lambda case: planted_run(case, norm=next(norms)), rounds=2)
    assert list(found.failed) == ["parallel block"]
    assert "1 in 'parallel block'" in found.failed["parallel block"]


def test_a_rung_that_fails_leaves_the_others_their_rows(tmp_path: Path) -> None:
    tried: list[str] = []

    def measure(case: Case) -> Run:
        tried.append(_name(case))
        if _name(case) in ("sliding window", "baseline"):
            raise LaunchError("rank 1 of 4: out of memory\nand more")
        return planted_run(case)

    found, _ = _climb(tmp_path, measure, rounds=2)
    assert list(found.rows) == ["parallel block", "LAMB 3x batch"]
    assert found.failed["TP overlap"] == (
        "not run: its losses must be those of 'sliding window', which has none"
    )
    assert tried.count("sliding window") == 1, "what failed once is not tried again"
    assert "TP overlap" not in tried
    lamb = found.rows["LAMB 3x batch"]
    assert lamb["over"] == "parallel block"
    assert lamb["sum_of_gains"] is lamb["total_speedup"] is None, "there is no baseline"
    lines = table(found).splitlines()
    assert any("no row: rank 1 of 4: out of memory" in line for line in lines)
    assert sum("not in this layout" in line for line in lines) == 1
    assert not any("and more" in line for line in lines)


def test_a_stop_ends_the_climb(tmp_path: Path) -> None:
    tried: list[str] = []

    def measure(case: Case) -> Run:
        tried.append(_name(case))
        raise StoppedError("stopped by SIGINT while no step was running")

    with pytest.raises(StoppedError):
        _climb(tmp_path, measure)
    assert tried == ["baseline"]


def test_an_unknown_device_has_throughput_and_no_gain(tmp_path: Path) -> None:
    def measure(case: Case) -> Run:
        steps = planted_run(case).steps
        return Run([{k: v for k, v in step.items() if "mfu" not in k} for step in steps])

    found, _ = _climb(tmp_path, measure)
    row = found.rows["sliding window"]
    assert row["value"] is row["gain"] is row["sum_of_gains"] is None
    assert row["speedup"] == pytest.approx(1.0)
    assert "x1.000" in table(found)


def test_noise_of_bfloat16_passes_and_more_does_not(tmp_path: Path) -> None:
    case = plan_tiny(tmp_path, num_ranks=1)[0].case
    assert case is not None
    right = planted_run(case)
    check_losses(right, case.config)
    check_same(planted_run(case, loss=FIRST_LOSS * (1 + 1e-4), norm=1.002), right, "bfloat16", "x")
    with pytest.raises(NumericalError, match=r"noise is at most 0\.0002 of it"):
        check_same(planted_run(case, loss=FIRST_LOSS * (1 + 3e-4)), right, "bfloat16", "x")
