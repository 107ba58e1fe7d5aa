"""What restarts cost, whether the loss went on, where it jumped, and classes that add up."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from megascale.telemetry.diagnose.compare import host_ratios, hosts_behind
from megascale.telemetry.diagnose.decomposition import CLASSES, classes
from megascale.telemetry.diagnose.history import Started, restarts
from megascale.telemetry.diagnose.numerics import loss_spikes


def _started(number: int, steps: tuple[int, int], begin_s: float) -> Started:
    """Steps of 2 s, the first 10 s after the header."""
    first_end = begin_s + 12
    end = first_end + 2 * (steps[1] - steps[0])
    return Started(number, steps, begin_s, end, first_end, 2.0)


def test_a_restart_costs_the_time_between_and_what_is_done_again() -> None:
    starts = [_started(0, (1, 60), 0), _started(1, (41, 80), 200)]
    losses = [dict.fromkeys(range(1, 61), 3.0), dict.fromkeys(range(41, 81), 3.0)]
    (found,) = restarts(starts, losses)
    assert (found.at_step, found.replayed) == (60, (41, 60))
    assert found.down_s == pytest.approx(200 + 12 - starts[0].end_s - 2)
    assert found.replay_s == 40
    assert found.loss_change == 0.0
    losses[1][50] = 3.3
    assert restarts(starts, losses)[0].loss_change == pytest.approx(0.1)


def test_a_restart_at_a_checkpoint_repeats_nothing() -> None:
    (found,) = restarts([_started(0, (1, 60), 0), _started(1, (61, 80), 200)], [{}, {}])
    assert (found.replayed, found.replay_s, found.loss_change) == (None, 0.0, None)


def test_a_start_that_finished_no_step_is_part_of_the_time_between() -> None:
    none = Started(1, None, 150.0, 150.0, 150.0, 0.0)
    found = restarts([_started(0, (1, 60), 0), none, _started(2, (51, 80), 300)], [{}, {}, {}])
    assert [one.number for one in found] == [2]
    assert found[0].replayed == (51, 60)


def _loss(seed: int, steps: int) -> list[float]:
    rng = random.Random(seed)
    return [2 + 8 * (step + 1) ** -0.3 + rng.gauss(0, 0.02) for step in range(steps)]


def test_no_spike_in_a_loss_that_falls() -> None:
    for seed in range(20):
        losses = _loss(seed, 1000)
        assert loss_spikes(range(1000), losses) == [], seed


@pytest.mark.parametrize("at", [60, 200, 700])
def test_a_spike_is_found_with_its_steps(at: int) -> None:
    for seed in range(10):
        losses = _loss(seed, 1000)
        for step in range(at, at + 4):
            losses[step] += 1.0
        (found,) = loss_spikes(range(1000), losses)
        assert (found.first_step, found.last_step) == (at, at + 3)
        assert found.peak == max(losses[at : at + 4])


def test_a_loss_that_is_not_finite_is_a_spike() -> None:
    losses = _loss(1, 100)
    losses[50] = math.nan
    (found,) = loss_spikes(range(100), losses)
    assert (found.first_step, found.last_step) == (50, 50)


def test_a_loss_that_stays_high_becomes_usual() -> None:
    losses = [loss + (step >= 100) for step, loss in enumerate(_loss(2, 400))]
    found = loss_spikes(range(400), losses)
    assert found[0].first_step == 100
    assert found[-1].last_step < 200


def test_classes_add_up_to_the_step() -> None:
    phases = {
        "forward": np.array([40.0, 44.0]),
        "backward": np.array([80.0, 80.0]),
        "tp_row_backward": np.array([10.0, 10.0]),
        "param_gather": np.array([2.0, np.nan]),
        "pp_wait": np.array([5.0, 5.0]),
        "grad_sync": np.array([7.0, 9.0]),
        "optimizer": np.array([3.0, 3.0]),
        "data_wait": np.array([1.0, 1.0]),
    }
    step = np.array([150.0, 150.0])
    found = classes(phases, step)
    assert list(found) == list(CLASSES)
    np.testing.assert_allclose(sum(found.values()), step)
    assert found["compute"].tolist() == [108.0, 114.0]
    assert found["tp"].tolist() == [10.0, 10.0]
    assert found["dp"].tolist() == [9.0, 9.0]
    assert found["other"].tolist() == [14.0, 8.0]


def test_hosts_behind_a_difference() -> None:
    """A host that is slow in both runs explains nothing."""
    hosts = [f"h{rank // 4}" for rank in range(16)]
    stage_R = np.arange(16) // 8
    rng = np.random.default_rng(0)
    good = (1.0 + stage_R) * rng.normal(1, 0.005, 16)
    good[0:4] *= 1.1
    bad = good.copy()
    bad[8:12] *= 1.1
    ratios = [host_ratios(one, stage_R, hosts) for one in (good, bad)]
    found = hosts_behind([0.5, 0.46], ratios)
    assert found is not None
    assert (found.faster, found.slower) == (0, 1)
    assert found.difference == pytest.approx(0.08)
    assert [host for host, _ in found.hosts] == ["h2"]
    assert hosts_behind([0.5], ratios[:1]) is None
