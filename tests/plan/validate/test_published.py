"""Printed rows as cases: their own formulas hold, and systems are what the papers say."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megascale.plan.parameters import model_parameters
from megascale.plan.validate.choices import CHOSEN
from megascale.plan.validate.published import (
    full_flops,
    korthikanti_rows,
    megascale_case,
    narayanan_rows,
    printed,
    published_model,
    table2_rows,
)
from megascale.plan.validate.replay import PAPER, replay
from megascale.plan.validate.rows import seconds_of_mfu


def test_printed_seconds_and_utilisation_of_table_2_agree_by_the_papers_formula() -> None:
    """Within the rounding of three digits; of MegaScale's, window pairs deducted."""
    for row, line in zip(table2_rows(), printed("table2"), strict=True):
        assert row.mfu_of(row.measured_s) == pytest.approx(line["mfu"], abs=0.006), row.label
        assert row.gpus == line["gpus"]


def test_korthikantis_printed_utilisation_follows_from_the_seconds() -> None:
    lines = list(printed("korthikanti"))
    for row, line in zip(korthikanti_rows(), lines, strict=True):
        share = line.number("mfu")
        if share is not None:
            assert row.mfu_of(row.measured_s) == pytest.approx(share, abs=0.002), row.label
    assert lines[-1].number("step_s") is None  # the abstract prints no seconds
    assert korthikanti_rows()[-1].measured_s == pytest.approx(39.15, abs=0.05)


def test_narayanans_seconds_count_the_recomputed_forward() -> None:
    row = narayanan_rows()[-1]  # one trillion parameters, 3,072 devices, 163 TFLOP/s
    by_hand = 96.0 * 3072 * 2048 * 128 * 25600**2
    by_hand *= 1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600)
    assert full_flops(row.case.job.model, 3072) == pytest.approx(by_hand)
    assert row.measured_s == pytest.approx(by_hand / (3072 * 163e12))
    assert row.measured_s == pytest.approx(102.6, abs=0.1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("megascale-175b", 174.7),
        ("megascale-530b", 529.8),
        ("gpt-22b", 22.1),
        ("gpt-1t", 1008.0),
        ("gpt-1_7b", 1.7),
    ],
)
def test_models_have_the_parameters_that_the_papers_print(name: str, billions: float) -> None:
    model = published_model(name)
    count = sum(p.num_elements for p in model_parameters(model, 2048))
    assert count / 1e9 == pytest.approx(billions, abs=max(0.06, 0.01 * billions))


def test_table_3_changes_one_thing_a_rung() -> None:
    rows = replay("table3")
    changed = []
    for below, row in pairwise(rows):
        a, b = below.case, row.case
        names = [k for k, v in vars(a.software).items() if v != getattr(b.software, k)]
        names += [k for k, v in a.job.model if v != getattr(b.job.model, k)]
        names += [k for k, v in vars(a.job).items() if k != "model" and v != getattr(b.job, k)]
        assert a.layout == b.layout
        changed.append(names)
    assert changed == [
        ["block"],
        ["attention_window"],
        ["tensor_overlap"],
        ["transfers"],
        ["overlap_grad_reduce", "overlap_param_gather"],
        ["operators"],
        ["host_ahead"],
        ["global_batch_size", "optimizer"],
    ]


def test_the_last_rung_of_table_3_is_table_2s_system() -> None:
    """But for what the ladder keeps of the baseline."""
    last = replay("table3")[-1].case
    system = next(row for row in replay("table2") if row.system == "megascale").case
    assert last.job == system.job
    kept = {"synchronises", "bucket_mb", "keeps_masks"}
    other = {k for k, v in vars(last.software).items() if v != getattr(system.software, k)}
    assert other <= kept


@pytest.mark.parametrize("name", PAPER)
def test_every_replayed_row_divides_its_batch(name: str) -> None:
    for row in replay(name):
        assert row.case.micro_batches % row.case.layout.pipeline == 0
        assert row.case.layout.num_devices == row.gpus
        assert row.effects.compute_factor > 1.0


def test_seconds_of_a_utilisation_are_its_inverse() -> None:
    line = next(printed("fig9"))
    job = megascale_case(line, CHOSEN, system="megatron-lm").job
    seconds = seconds_of_mfu(job, line["gpus"], line["mfu"], 312.0)
    assert seconds == pytest.approx(43.1, abs=0.1)
