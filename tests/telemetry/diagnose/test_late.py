"""Late launchers are named, those that wait for them are not; what slow ranks cost; heat maps."""

from __future__ import annotations

import json
import random
import time

import numpy as np
import pytest

from megascale.telemetry.diagnose import DETECTORS
from megascale.telemetry.diagnose.late import Launch, late_launchers
from megascale.telemetry.diagnose.summary import heat_map
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


def _sums(mesh: Mesh, seed: int, slow: dict[int, float]) -> dict[int, list[dict[str, int]]]:
    rng = np.random.default_rng(seed)
    found: dict[int, list[dict[str, int]]] = {}
    for rank in range(mesh.world_size):
        work = 1 + mesh.coordinates(rank).pp_rank
        forward_S = rng.normal(10e6, 0.1e6, 5) * work * (1 + slow.get(rank, 0))
        found[rank] = [{"forward": int(ns), "optimizer": int(ns * 0.1)} for ns in forward_S]
    return found


def test_the_heat_map_and_what_stands_out() -> None:
    mesh = Mesh(2, 16, 2)
    hosts = {rank: f"h{rank // 8}" for rank in range(mesh.world_size)}
    clean = heat_map(_sums(mesh, 0, {}), mesh, hosts)
    assert clean.outliers == ()
    assert clean.mean_ms_RP.shape == (64, 2)
    assert clean.mean_ms_RP[0, 0] == pytest.approx(10, rel=0.05)
    assert clean.mean_ms_RP[63, 0] == pytest.approx(20, rel=0.05)
    one = heat_map(_sums(mesh, 1, {21: 0.2}), mesh, hosts)
    assert {(o.dimension, o.value) for o in one.outliers} == {("rank", "21")}
    host = heat_map(_sums(mesh, 2, dict.fromkeys(range(8, 16), 0.2)), mesh, hosts)
    assert {o.value for o in host.outliers if o.dimension == "host"} == {"h1"}
    forward = next(o for o in host.outliers if o.dimension == "host" and o.phase == "forward")
    assert forward.num_ranks == 8
    assert forward.share == pytest.approx(0.2, abs=0.05)


def test_a_percent_stands_out_of_nothing() -> None:
    sums = {rank: [{"forward": 10 * MS + (rank == 3) * MS // 10}] for rank in range(8)}
    assert heat_map(sums, Mesh(1, 8, 1)).outliers == ()


def test_the_heat_map_is_json() -> None:
    sums = _sums(Mesh(1, 4, 1), 3, {2: 0.5})
    sums[1] = [{"forward": 10 * MS}]
    found = json.loads(json.dumps(heat_map(sums, Mesh(1, 4, 1)).as_json(), allow_nan=False))
    assert found["mean_ms"][1] == [10.0, None]
    assert found["outliers"][0]["value"] == "2"


def test_a_heat_map_of_twelve_thousand_ranks() -> None:
    mesh = Mesh(8, 192, 8)
    sums = _sums(mesh, 4, {4_321: 0.1})
    since = time.monotonic()
    found = heat_map(sums, mesh, {rank: f"h{rank // 8}" for rank in range(mesh.world_size)})
    assert time.monotonic() - since < 10
    assert {(o.dimension, o.value) for o in found.outliers} == {("rank", "4321")}


def test_every_detector_has_a_docstring_and_its_module_a_test() -> None:
    assert len(DETECTORS) == len(set(DETECTORS.values()))
    for name, detector in DETECTORS.items():
        assert detector.__doc__, name
        assert detector.__module__.startswith("megascale.telemetry.diagnose."), name
