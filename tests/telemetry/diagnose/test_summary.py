"""Heat maps: who stands out, along which dimension, and who only waits."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from megascale.telemetry.diagnose.summary import COMPUTE, HeatMap, heat_map, hosts_of
from megascale.topology import Mesh

PHASES = ("forward", "optimizer")
Floats = NDArray[np.float64]


def _means(mesh: Mesh, seed: int, slow: dict[int, float]) -> tuple[NDArray[np.int64], Floats]:
    """Stages do different work; the optimizer takes a tenth."""
    rng = np.random.default_rng(seed)
    rank_R = np.arange(mesh.world_size)
    forward_R = rng.normal(10, 0.05, len(rank_R)) * (1 + rank_R // (mesh.tensor * mesh.data))
    for rank, share in slow.items():
        forward_R[rank] *= 1 + share
    return rank_R, np.stack([forward_R, 0.1 * rng.normal(10, 0.05, len(rank_R))], axis=1)


def _hosts(mesh: Mesh) -> list[str]:
    return [f"h{rank // 8:04d}" for rank in range(mesh.world_size)]


def _found(mesh: Mesh, slow: dict[int, float]) -> HeatMap:
    rank_R, means = _means(mesh, 1, slow)
    return heat_map(rank_R, PHASES, means, mesh, _hosts(mesh))


def test_nobody_stands_out_of_equals() -> None:
    mesh = Mesh(2, 16, 2)
    rank_R, means = _means(mesh, 0, {})
    found = heat_map(rank_R, PHASES, means, mesh, _hosts(mesh))
    assert found.outliers == ()
    assert found.phases == (COMPUTE, *PHASES)
    np.testing.assert_array_equal(found.mean_ms_RP[:, 0], means[:, 0])


def test_one_rank_and_one_host() -> None:
    mesh = Mesh(2, 16, 2)
    found = _found(mesh, {21: 0.2})
    assert {(o.dimension, o.value) for o in found.outliers} == {("rank", "21")}
    found = _found(mesh, dict.fromkeys(range(8, 16), 0.2))
    first = found.outliers[0]
    assert (first.dimension, first.value, first.phase) == ("host", "h0001", COMPUTE)
    assert first.num_ranks == 8
    assert first.share == pytest.approx(0.2, abs=0.02)
    assert not first.waits


def test_who_waits_is_said_to_wait() -> None:
    """Rank 3's tensor peer waits for it inside its own forward: only rank 3 computes longer."""
    mesh = Mesh(2, 8, 1)
    waits_R = np.full(16, 1.0)
    waits_R[2] += 3.0
    forward_R = np.full(16, 11.0)
    forward_R[2:4] += 3.0
    means = np.stack([forward_R, waits_R], axis=1)
    found = heat_map(np.arange(16), ("forward", "tp_row_backward"), means, mesh)
    own = [(o.dimension, o.value, o.phase) for o in found.outliers if not o.waits]
    assert own == [("rank", "3", COMPUTE)]
    assert {(o.value, o.phase) for o in found.outliers if o.waits} >= {("2", "tp_row_backward")}


def test_a_percent_stands_out_of_nothing_nor_a_thousandth_of_a_step() -> None:
    rank_R = np.arange(8)
    forward_R = np.where(rank_R == 3, 10.1, 10.0)
    data_wait_R = np.where(rank_R == 5, 0.02, 0.01)
    means = np.stack([forward_R, data_wait_R], axis=1)
    assert heat_map(rank_R, ("forward", "data_wait"), means, Mesh(1, 8, 1)).outliers == ()
    data_wait_R[5] = 2.0
    means = np.stack([forward_R, data_wait_R], axis=1)
    found = heat_map(rank_R, ("forward", "data_wait"), means, Mesh(1, 8, 1)).outliers
    assert [(o.value, o.phase) for o in found if o.dimension == "rank"] == [("5", "data_wait")]


def test_a_pause_in_a_window_of_few_steps_is_not_slowness() -> None:
    """40 steps of 1,536 ranks, of which each pauses now and then for up to 2.8 steps."""
    mesh, rng = Mesh(1, 1536, 1), np.random.default_rng(0)
    rank_R = np.arange(mesh.world_size)
    means = rng.normal(10, 0.005, (mesh.world_size, 1))
    means[rng.choice(mesh.world_size, 20, replace=False), 0] *= 1 + 2.8 / 40
    means[700, 0] = 11.0
    few = heat_map(rank_R, ("optimizer",), means, mesh, num_steps=40)
    assert {o.value for o in few.outliers} == {"700"}
    many = heat_map(rank_R, ("optimizer",), means, mesh, num_steps=100)
    assert len([o for o in many.outliers if o.dimension == "rank"]) > 15


def test_a_pause_makes_its_whole_group_wait_and_that_is_not_worth_a_word() -> None:
    """Of 1,024 ranks some have paused in the window, and their tensor peers have waited as long, in
    a phase that takes a hundredth of a step otherwise."""
    mesh, rng, num_steps = Mesh(8, 128, 1), np.random.default_rng(0), 20
    rank_R = np.arange(mesh.world_size)
    forward_R = rng.normal(100, 0.05, len(rank_R))
    waits_R = rng.normal(1, 0.05, len(rank_R))
    for pausing in rng.choice(mesh.world_size, 30, replace=False).tolist():
        pause_ms = 2.5 * 100 / num_steps
        peers = rank_R // mesh.tensor == pausing // mesh.tensor
        forward_R[peers] += pause_ms
        waits_R[peers & (rank_R != pausing)] += pause_ms
    means = np.stack([forward_R, waits_R], axis=1)
    phases = ("forward", "tp_row_backward")
    found = heat_map(rank_R, phases, means, mesh, _hosts(mesh), num_steps=num_steps)
    assert found.outliers == ()
    waits_R[rank_R // mesh.tensor == 5] += 30.0
    means = np.stack([forward_R, waits_R], axis=1)
    found = heat_map(rank_R, phases, means, mesh, _hosts(mesh), num_steps=num_steps)
    waiting = {o.value for o in found.outliers if o.waits and o.dimension == "host"}
    assert waiting == {"h0005"}, "30 of 100 ms in every step are no pause"


def test_json_has_no_nan() -> None:
    rank_R, means = _means(Mesh(1, 4, 1), 3, {2: 0.5})
    means[1, 1] = np.nan
    found = heat_map(rank_R, PHASES, means, Mesh(1, 4, 1)).as_json()
    told = json.loads(json.dumps(found, allow_nan=False))
    assert told["mean_ms"][1][2] is None
    assert told["mean_ms"][0][1] == pytest.approx(means[0, 0], abs=1e-4)
    assert told["outliers"][0]["value"] == "2"


def test_twelve_thousand_ranks() -> None:
    mesh = Mesh(8, 192, 8)
    rank_R, means = _means(mesh, 4, {4_321: 0.1})
    means = np.column_stack([means[:, :1], *[means[:, 1:]] * 9])
    phases = ("forward", *(f"phase_{number}" for number in range(9)))
    since = time.monotonic()
    found = heat_map(rank_R, phases, means, mesh, _hosts(mesh))
    assert time.monotonic() - since < 5
    assert {(o.dimension, o.value) for o in found.outliers} == {("rank", "4321")}


def test_hosts_all_of_whose_ranks_are_guilty() -> None:
    of = {rank: f"h{rank // 4}" for rank in range(12)}
    assert hosts_of([4, 5, 6, 7, 9], of) == ["h1"]
    assert hosts_of([1], {0: "a", 1: "b"}) == []
