"""Late launchers are named, those that wait for them are not; what slow ranks cost."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from megascale.telemetry.diagnose import DETECTORS
from megascale.telemetry.diagnose.late import Launch, late_launchers, lateness
from megascale.telemetry.diagnose.swing import swing
from megascale.telemetry.diagnose.what_if import what_if
from megascale.topology import Mesh

MS = 1_000_000


def _launches(
    mesh: Mesh,
    seed: int,
    late: dict[int, int],
    *,
    rounds: int = 40,
    axes: tuple[str, ...] = ("data",),
    often: float = 1.0,
) -> list[Launch]:
    """Blocking collectives, first in tensor groups, then in data groups, 20 ms of work before each.
    Ranks of `late` take as many ns longer before those along `axes`, in a share `often` of them."""
    rng = random.Random(seed)
    free_ns = [0] * mesh.world_size
    found = []
    for number in range(2 * rounds):
        axis = ("tensor", "data")[number % 2]
        for instance, members in enumerate(mesh.groups(axis)):
            times = {}
            for rank in members:
                is_late = axis in axes and rng.random() < often
                own_ns = rng.uniform(19, 21) * MS + is_late * late.get(rank, 0)
                times[rank] = free_ns[rank] + round(own_ns)
                found.append(Launch(rank, f"{axis} {instance}", number, times[rank]))
            for rank in members:
                free_ns[rank] = max(times.values())
    return found


@pytest.mark.parametrize("mesh", [Mesh(2, 4, 1), Mesh(4, 2, 1), Mesh(2, 2, 2)])
def test_the_late_launcher_and_nobody_that_waits(mesh: Mesh) -> None:
    for seed in range(10):
        guilty = seed % mesh.world_size
        finding = late_launchers(_launches(mesh, seed, {guilty: 8 * MS}), step=9)
        assert finding is not None
        assert (finding.ranks, finding.step) == ((guilty,), 9)
        assert finding.evidence["late_ms"][str(guilty)] == pytest.approx(8, abs=1.5)
        assert late_launchers(_launches(mesh, seed, {})) is None
        always = _launches(mesh, seed, {guilty: 8 * MS}, axes=("tensor", "data"))
        finding = late_launchers(always)
        assert finding is not None
        assert finding.ranks == (guilty,)


def test_irregular_lateness() -> None:
    """A garbage collection now and then is everybody's; often, it is one rank's."""
    mesh = Mesh(2, 4, 1)
    seldom = _launches(mesh, 1, dict.fromkeys(range(8), 30 * MS), often=0.1, rounds=200)
    assert late_launchers(seldom) is None
    irregular = _launches(mesh, 2, {6: 30 * MS}, often=0.6, rounds=200)
    finding = late_launchers(irregular)
    assert finding is not None
    assert finding.ranks == (6,)


def test_a_few_late_launches_are_none() -> None:
    assert late_launchers(_launches(Mesh(1, 8, 1), 3, {2: 30 * MS}, rounds=4)) is None


def test_what_the_slow_cost() -> None:
    stage_R = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    compute_SR = np.ones((20, 8))
    step_S = np.full(20, 1.5)
    nothing = what_if(step_S, compute_SR, stage_R, None)
    assert (nothing.step_s, nothing.without_s, nothing.saved) == (1.5, 1.5, 0.0)
    compute_SR[:, 5] = 1.3
    step_S += 0.3
    for slow in ([5], None):
        estimate = what_if(step_S, compute_SR, stage_R, slow)
        assert estimate.without_s == pytest.approx(1.5)
        assert estimate.saved == pytest.approx(0.3 / 1.8)
    assert what_if(step_S, compute_SR, stage_R, [1]).saved == 0.0
    compute_SR[:, 2] = 1.2  # what is left once the slowest is gone
    assert what_if(step_S, compute_SR, stage_R, [5]).without_s == pytest.approx(1.5)
    assert what_if(step_S, compute_SR, stage_R, None).without_s == pytest.approx(1.5)
    compute_SR[:, 6] = 1.2  # the same in its own stage
    assert what_if(step_S, compute_SR, stage_R, [5]).without_s == pytest.approx(1.7)


def test_every_detector_has_a_docstring_and_its_module_a_test() -> None:
    assert len(DETECTORS) == len(set(DETECTORS.values()))
    for name, detector in DETECTORS.items():
        assert detector.__doc__, name
        assert detector.__module__.startswith("megascale.telemetry.diagnose."), name


# ---------------------------------------------------------------- at 12,288 ranks, and in turns


def _own_times(
    mesh: Mesh, rounds: int, seed: int, late: dict[int, float]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """(rank, meeting, own ns) of launches in data groups, 1 s of work before each, with 2 % noise,
    half of which is common to a host; `late` ranks take so many ns longer."""
    rng, num_ranks = np.random.default_rng(seed), mesh.world_size
    rank_R = np.arange(num_ranks)
    stage = mesh.tensor * mesh.data
    instance_R = rank_R // stage * mesh.tensor + rank_R % mesh.tensor
    host = rng.normal(0, 0.014, (rounds, num_ranks // 8 + 1))[:, rank_R // 8]
    own = 1e9 * (1 + host + rng.normal(0, 0.014, (rounds, num_ranks)))
    own += rng.choice([0.0, 80e6], (rounds, num_ranks), p=[0.98, 0.02])  # garbage
    for rank, ns in late.items():
        own[:, rank] += ns
    meeting = np.arange(rounds)[:, None] * num_ranks + instance_R
    return np.tile(rank_R, rounds), meeting.reshape(-1), own.reshape(-1)


@pytest.mark.parametrize("mesh", [Mesh(2, 4, 1), Mesh(1, 8, 1), Mesh(8, 192, 8)])
def test_five_percent_late_among_noise(mesh: Mesh) -> None:
    for seed in range(3):
        guilty = (seed * 4_111 + 3) % mesh.world_size
        began_s = time.monotonic()
        rounds = 20 if mesh.world_size > 8 else 60
        found = lateness(*_own_times(mesh, rounds, seed, {guilty: 50e6}), steady=True)
        assert time.monotonic() - began_s < 5
        assert found.rank_R[found.is_late_R].tolist() == [guilty]
        assert found.late_ns_R[guilty] == pytest.approx(50e6, rel=0.4)


def test_nobody_is_late_in_clean_windows() -> None:
    for seed in range(100):
        found = lateness(*_own_times(Mesh(1, 8, 1), 20, seed, {}), steady=True)
        assert not found.is_late_R.any(), seed


def test_ranks_on_cores_that_all_share_are_not_late() -> None:
    """Two ranks a data group, each early by much as often as late: noise, however large."""
    rng = np.random.default_rng(0)
    for seed in range(100):
        rank, meeting, own = _own_times(Mesh(2, 2, 1), 40, seed, {})
        own = own * rng.lognormal(0, 0.8, len(own))
        found = lateness(rank, meeting, own, steady=True)
        assert found.num_late_R.max() > 0.3 * 40
        assert not found.is_late_R.any(), seed
    rank, meeting, own = _own_times(Mesh(2, 2, 1), 40, 0, {3: 2e9})
    found = lateness(rank, meeting, own * rng.lognormal(0, 0.3, len(own)), steady=True)
    assert found.rank_R[found.is_late_R].tolist() == [3]


def _in_turns(
    seed: int, growth: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
    """Two ranks a data group, of which now one and now the other pauses, longer with every step."""
    rank, meeting, own = _own_times(Mesh(4, 2, 1), 60, seed, {})
    step = meeting // 8
    rng = np.random.default_rng(seed)
    pauses = rng.random(len(own)) < 0.5
    return rank, meeting, own + pauses * rng.exponential(1.0, len(own)) * growth * step, step


def test_ranks_that_are_late_in_turns() -> None:
    """MegaScale 6.3: the offset swings to and fro between two ranks, and grows."""
    for seed in range(10):
        rank, meeting, own, step = _in_turns(seed, 5e6)
        found = swing(step, meeting, lateness(rank, meeting, own).excess_ns_L)
        assert found.grows, seed
        assert found.last_s > 1.5 * found.first_s
    for seed in range(100):
        rank, meeting, own, step = _in_turns(seed, 0.0)
        assert not swing(step, meeting, lateness(rank, meeting, own).excess_ns_L).grows, seed
