"""Growth is found, dated and named; noise is no growth."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.telemetry.diagnose.drift import behind_first, growing, launch_offsets

STEPS = np.arange(1, 1001)


def _noisy(seed: int, ms: float, steps: int = 1000) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """5 % from step to step, and a pause in every hundredth."""
    rng = np.random.default_rng(seed)
    value = ms * (1 + rng.normal(0, 0.05, steps))
    return np.asarray(value + ms * (rng.random(steps) < 0.01))


def test_nothing_grows_in_noise() -> None:
    for seed in range(50):
        values = {"forward": _noisy(seed, 400), "grad_sync": _noisy(seed + 1000, 60)}
        assert growing(STEPS, values, _noisy(seed, 1000)) == [], seed


@pytest.mark.parametrize("since", [1, 300, 600])
def test_growth_since_a_step(since: int) -> None:
    for seed in range(20):
        grown = 60 * (1 + 0.003 * np.maximum(0, STEPS - since))
        values = {"forward": _noisy(seed, 400), "grad_sync": _noisy(seed, 1) * grown}
        (found,) = growing(STEPS, values, _noisy(seed, 1000) + grown)
        assert found.phase == "grad_sync"
        assert abs(found.since_step - since) <= 100
        assert found.after_ms > found.before_ms + 10


def test_a_jump_is_dated_to_its_bucket() -> None:
    value = np.where(STEPS < 700, 60.0, 90.0) + 0 * _noisy(0, 1)
    (found,) = growing(STEPS, {"optimizer": value}, np.full(1000, 1000.0))
    assert 690 <= found.since_step <= 725
    assert (found.before_ms, found.after_ms) == (60.0, 90.0)
    assert found.share == 0.5
    assert found.of_step == pytest.approx(0.03)


def test_few_steps_and_small_phases_say_nothing() -> None:
    few = STEPS[:15]
    assert growing(few, {"gc": few.astype(float)}, np.full(15, 100.0)) == []
    assert growing(STEPS, {"gc": 1.0 + STEPS.astype(float) / 1000}, np.full(1000, 1000.0)) == []


def test_who_launches_later_than_at_first() -> None:
    """Waits end together: who launches late waits least. Groups of four, 100 ms of waiting."""
    rng = np.random.default_rng(0)
    group_R = np.arange(32) // 4
    before, after = 100 + rng.normal(0, 0.5, (2, 30, 32))
    late = after.copy()
    late[:, 13] -= 40
    found = launch_offsets(before, late, group_R, step_ms=1000)
    assert found.ranks == (13,)
    assert launch_offsets(before, after, group_R, step_ms=1000).ranks == ()
    swinging = after - 80 * rng.random(after.shape) * (rng.random(after.shape) < 0.3)
    found = launch_offsets(before, swinging, group_R, step_ms=1000)
    assert found.ranks == ()
    assert found.after_ms > 10 * found.before_ms


def test_steps_that_a_group_did_not_finish() -> None:
    """As before a restart: nothing is known of them, and nothing is warned of."""
    wait_ms_SR = np.array([[5.0, 7.0, 1.0, 4.0], [np.nan, np.nan, 1.0, np.nan]])
    found = behind_first(wait_ms_SR, np.array([0, 0, 1, 1]))
    np.testing.assert_array_equal(found, [[2, 0, 3, 0], [0, 0, 0, 0]])
