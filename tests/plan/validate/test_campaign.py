"""The validation itself: what it is held to, what it shows, what is fitted."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megascale.plan.validate.campaign import Campaign, run_campaign
from megascale.plan.validate.fit import BOUNDS, fit, fitted_models, tables_of
from megascale.plan.validate.machines import changed, load_machines
from megascale.plan.validate.published import korthikanti_rows, table2_rows
from megascale.plan.validate.scale import fit_fixed_s, predict_s, with_scale
from megascale.plan.validate.scores import scores
from megascale.plan.validate.table import start_validation, text
from megascale.plan.validate.targets import targets

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def campaign() -> Campaign:
    return run_campaign(results=RESULTS)


@pytest.mark.parametrize(
    "name",
    [
        "Korthikanti, 8 rows, mean",
        "Korthikanti, 8 rows, worst",
        "Table 2, Megatron-LM, mean",
        "Table 2, Megatron-LM, trend",
        "Table 2, MegaScale, mean",
        "Table 2, MegaScale, worst",
        "Table 2, MegaScale, trend",
        "own H200 runs, mean",
        "own H200 runs, worst",
        "own H200 runs, regret",
        "own H200 runs, peak memory, mean",
    ],
)
def test_what_is_held(campaign: Campaign, name: str) -> None:
    (line,) = [target for target in targets(campaign) if target.name == name]
    assert line.met, f"{name}: {line.value:.4f}, at most {line.limit}"


def test_every_rung_of_table_3_gains_in_the_papers_direction(campaign: Campaign) -> None:
    gains = [
        (rung.mfu - below.mfu, rung.measured_mfu - below.measured_mfu)
        for below, rung in pairwise(campaign.table3)
    ]
    assert all(predicted > 0 for predicted, _ in gains)
    assert sum(abs(100 * (a - b)) <= 0.8 for a, b in gains) >= 7


def test_held_out_rows_are_told_from_fitted_ones(campaign: Campaign) -> None:
    fitted = {group.name for group in campaign.groups if group.is_fitted}
    assert fitted == {"korthikanti, fitted", "table2, megatron-lm"}
    for group in campaign.groups:
        assert all(p.row.fitted == group.is_fitted for p in group.predicted), group.name


def test_the_constant_is_the_least_squares_of_the_relative_errors() -> None:
    rows = [row for row in table2_rows() if row.fitted]
    best = fit_fixed_s(rows)

    def squares(fixed_s: float) -> float:
        scaled = with_scale(rows, fixed_s)
        return sum((predict_s(row) / row.measured_s - 1) ** 2 for row in scaled)

    assert squares(best) < min(squares(best + 0.05), squares(best - 0.05))
    assert fit_fixed_s([]) == 0.0


def test_the_fit_finds_numbers_that_rows_were_made_with() -> None:
    """Seconds predicted with known numbers, as if measured: the fit comes back to them."""
    machines = load_machines()
    known = {
        "device.gemm.share": 0.80,
        "device.memory.shares.scores": 0.55,
        "overlap.compute_nvlink": 1.25,
    }
    made = machines.with_a100(tables_of(known))
    rows = [row for row in korthikanti_rows(made.a100) if row.fitted]
    measured = [replace(row, measured_s=predict_s(row)) for row in rows]
    found = fit(measured, measured, machines)
    assert set(found) == set(BOUNDS)
    assert found["device.gemm.share"] == pytest.approx(0.80, rel=0.02)
    refitted = machines.with_a100(tables_of(found)).a100
    for row in measured:
        again = predict_s(replace(row, cluster=refitted))
        assert again == pytest.approx(row.measured_s, rel=0.005)


def test_a_changed_cluster_forgets_what_it_remembered() -> None:
    row = korthikanti_rows()[0]
    before = predict_s(row)
    slower = changed(row.cluster, {"device": {"gemm": {"share": 0.5}}})
    assert predict_s(replace(row, cluster=slower)) > 1.2 * before
    assert predict_s(row) == before


def test_the_split_is_by_whole_models_and_by_seed() -> None:
    assert len(fitted_models()) == 2
    assert fitted_models(0) == fitted_models(0) != fitted_models(1)


def test_text_and_document_tell_the_same(campaign: Campaign) -> None:
    document = json.loads(start_validation(None, as_json=True))
    shown = text(campaign, None)
    assert "Predicted, never measured" in shown
    assert "--data FILE" in shown
    for group in document["groups"]:
        if group["name"] == "own":  # of the folder that the program runs in
            continue
        found = campaign.group(group["name"])
        assert found is not None
        assert group["scores"]["mean"] == pytest.approx(scores(found.predicted).mean)
        assert group["name"] in shown
    assert [t["name"] for t in document["targets"] if t["name"].startswith("Table")] == [
        t.name for t in targets(campaign) if t.name.startswith("Table")
    ]


def test_the_csv_of_measured_runs() -> None:
    """Runs where the file is: MEGASCALE_MEASURED_RUNS names it."""
    data = os.environ.get("MEGASCALE_MEASURED_RUNS")
    if not data:
        pytest.skip("MEGASCALE_MEASURED_RUNS names no CSV of measured runs")
    lines = {t.name: t for t in targets(run_campaign(Path(data), RESULTS))}
    assert lines["vTrain, 109 rows, mean"].met
    assert lines["vTrain, GPT-175B, regret"].met
