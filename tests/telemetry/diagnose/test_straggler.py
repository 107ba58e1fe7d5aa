"""Slow ranks: found exactly, at 8 and at 12,288 ranks, and nobody among healthy ones."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from megascale.cluster.chaos.noise import MODEL, Noise
from megascale.telemetry.diagnose.straggler import (
    CONFIRM,
    WINDOW_STEPS,
    Window,
    compute_ns,
    cut,
    stragglers,
    window,
)
from megascale.topology import Mesh

LARGE = Mesh(8, 192, 8)


def _stages(mesh: Mesh) -> NDArray[np.int64]:
    return np.array([mesh.coordinates(rank).pp_rank for rank in range(mesh.world_size)])


def _windows(noise: Noise, stage_R: NDArray[np.int64], number: int) -> list[Window]:
    return [
        window(noise.steps(WINDOW_STEPS), stage_R, (1 + i) * WINDOW_STEPS) for i in range(number)
    ]


def test_the_noise_is_as_its_file_says() -> None:
    stage_R = _stages(Mesh(8, 8, 1))
    times_SR = Noise(stage_R, seed=1, model={**MODEL, "pause_chance": 0.0}).steps(2000)
    relative = times_SR / times_SR.mean(axis=1, keepdims=True)
    assert np.std(relative, axis=0).mean() == pytest.approx(0.02, rel=0.1)
    same_host = np.corrcoef(relative[:, 0], relative[:, 7])[0, 1]
    other_host = np.corrcoef(relative[:, 0], relative[:, 8])[0, 1]
    assert same_host == pytest.approx(0.5, abs=0.1)
    assert abs(other_host) < 0.15


@pytest.mark.parametrize("mesh", [Mesh(1, 8, 1), Mesh(2, 2, 2), Mesh(8, 1, 1), Mesh(4, 1, 2)])
def test_ten_percent_among_eight_within_three_windows(mesh: Mesh) -> None:
    stage_R = _stages(mesh)
    for seed in range(20):
        slow = seed % 8
        noise = Noise(
            stage_R, seed=seed, stage_s=np.linspace(1.0, 0.6, mesh.pipeline), slow={slow: 0.10}
        )
        windows = cut(noise.steps(3 * WINDOW_STEPS), stage_R)
        finding = stragglers(windows, stage_R)
        assert finding is not None, seed
        assert finding.ranks == (slow,)
        assert finding.evidence["share"][str(slow)] == pytest.approx(0.10, abs=0.03)
        assert finding.evidence["windows"] == {str(slow): CONFIRM}
        assert finding.evidence["peers"] == {str(slow): 8 // mesh.pipeline - 1}
        assert (finding.kind, finding.step) == ("straggler", 3 * WINDOW_STEPS)
        assert stragglers(windows[:2], stage_R) is None


@pytest.mark.full
def test_three_percent_in_one_of_twelve_thousand() -> None:
    stage_R = _stages(LARGE)
    noise = Noise(stage_R, seed=5, slow={7_777: 0.03})
    windows = _windows(noise, stage_R, 10)
    finding = stragglers(windows, stage_R)
    assert finding is not None
    assert finding.ranks == (7_777,)
    assert finding.evidence["share"]["7777"] == pytest.approx(0.03, abs=0.01)


def test_a_slow_host_is_eight_slow_ranks() -> None:
    stage_R = _stages(Mesh(8, 16, 1))
    noise = Noise(stage_R, seed=3, slow=dict.fromkeys(range(40, 48), 0.1))
    finding = stragglers(_windows(noise, stage_R, 3), stage_R)
    assert finding is not None
    assert finding.ranks == tuple(range(40, 48))


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "seed"), [(Mesh(1, 8, 1), 0), (Mesh(2, 2, 2), 1), (Mesh(8, 8, 1), 2)]
)
def test_no_false_alarm_in_a_thousand_clean_windows(mesh: Mesh, seed: int) -> None:
    stage_R = _stages(mesh)
    noise = Noise(stage_R, seed=seed)
    windows: list[Window] = []
    for number in range(1000):
        windows = [*windows, *_windows(noise, stage_R, 1)][-10:]
        assert stragglers(windows, stage_R) is None, number


@pytest.mark.full
def test_no_false_alarm_among_twelve_thousand() -> None:
    stage_R = _stages(LARGE)
    noise = Noise(stage_R, seed=9)
    windows: list[Window] = []
    for number in range(40):
        windows = [*windows, *_windows(noise, stage_R, 1)][-10:]
        assert stragglers(windows, stage_R) is None, number


def test_two_slow_windows_and_a_good_one_are_no_straggler() -> None:
    stage_R = _stages(Mesh(1, 8, 1))
    slow = _windows(Noise(stage_R, seed=1, slow={2: 0.2}), stage_R, 2)
    good = _windows(Noise(stage_R, seed=2), stage_R, 1)
    assert stragglers([*slow, *good], stage_R) is None
    assert stragglers([*slow, *slow], stage_R) is not None


def test_garbage_collections_are_no_slowness() -> None:
    """Of one rank alone, in a third of its steps, half a step long."""
    stage_R = _stages(Mesh(1, 8, 1))
    times_SR = Noise(stage_R, seed=4).steps(3 * WINDOW_STEPS)
    times_SR[::3, 5] += 0.5
    assert stragglers(cut(times_SR, stage_R), stage_R) is None


def test_stages_of_different_cost_are_not_compared() -> None:
    stage_R = _stages(Mesh(1, 4, 2))
    noise = Noise(stage_R, seed=6, stage_s=np.array([1.0, 2.0]))
    assert stragglers(_windows(noise, stage_R, 3), stage_R) is None


def test_missing_reports_are_left_out() -> None:
    stage_R = _stages(Mesh(1, 8, 1))
    times_SR = Noise(stage_R, seed=7, slow={1: 0.1}).steps(3 * WINDOW_STEPS)
    times_SR[10:20, 3] = np.nan
    times_SR[40:45] = 0
    times_SR[:, 6] = np.nan
    finding = stragglers(cut(times_SR, stage_R), stage_R)
    assert finding is not None
    assert finding.ranks == (1,)


def test_a_stage_of_one_rank_has_no_peers() -> None:
    stage_R = _stages(Mesh(1, 1, 4))
    noise = Noise(stage_R, seed=8, slow={2: 0.5})
    assert stragglers(_windows(noise, stage_R, 3), stage_R) is None


def test_waits_inside_computations_are_taken_out() -> None:
    phases = {"forward": 100, "backward": 200, "tp_row_backward": 60, "param_gather": 5, "send": 9}
    assert compute_ns(phases) == 235
    assert compute_ns({"optimizer": 50}) == 0
