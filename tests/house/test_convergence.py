"""The rule by which two algorithms learn equally well, by hand."""

from __future__ import annotations

import pytest

from benchmarks.convergence.variants import BATCH, STEPS, VARIANTS, compare, pooled_deviation


def test_pooled_deviation_by_hand() -> None:
    # squares about the means: 2 + 0.5, of 2 + 1 degrees of freedom
    assert pooled_deviation([[1.0, 2.0, 3.0], [5.0, 6.0]]) == pytest.approx((2.5 / 3) ** 0.5)


def test_two_deviations_apart_is_equal_and_more_is_not() -> None:
    baseline = [3.00, 3.02, 2.98, 3.00]
    near, far = compare([3.01, 3.03], baseline), compare([3.06, 3.08], baseline)
    assert near.is_equal
    assert near.difference == pytest.approx(0.02)
    assert not far.is_equal
    assert far.allowed == pytest.approx(near.allowed)
    assert not compare([2.92, 2.94], baseline).is_equal, "better is a difference too"


def test_every_variant_sees_the_same_tokens() -> None:
    for variant in VARIANTS:
        settings = dict(s.split("=") for s in variant.settings(1, 1e-3))
        steps, batch = settings["training.steps"], settings["training.global_batch_size"]
        assert int(steps) * int(batch) == STEPS * BATCH
        assert int(settings["validation.batches"]) * int(batch) == 16 * BATCH
        assert STEPS % (int(settings["validation.interval"]) * variant.batch) == 0
