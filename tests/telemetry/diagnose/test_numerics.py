"""Losses, gradients and replicas: the faulty ones exactly, and nobody where nothing is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.telemetry.diagnose.numerics import CONFIRM, loss_spike, nonfinite
from megascale.telemetry.diagnose.replicas import differing_replicas
from megascale.topology import Mesh


def _losses(seed: int, number: int = 400) -> list[float]:
    """From 9 down to 3 nats, 2 % from step to step."""
    rng = np.random.default_rng(seed)
    falling = 3 + 6 * np.exp(-np.arange(number) / 80)
    return [float(x) for x in falling * rng.normal(1, 0.02, number)]


@pytest.mark.parametrize("seed", range(10))
def test_a_falling_loss_is_no_spike(seed: int) -> None:
    losses = _losses(seed)
    assert all(loss_spike(losses[:end], end) is None for end in range(1, len(losses) + 1))


def test_a_spike_is_an_alert_and_three_are_certain() -> None:
    losses = _losses(1)
    for number in range(CONFIRM):
        losses[300 + number] *= 2
    for number, certain in ((1, False), (2, False), (3, True)):
        finding = loss_spike(losses[: 300 + number], 300 + number)
        assert finding is not None
        assert (finding.certain, finding.evidence["in_a_row"]) == (certain, number)
        assert finding.evidence["loss"] == losses[299 + number]
        assert finding.step == 300 + number
        assert finding.evidence["agreed_step"] == 300, "the last before the jump"
    assert loss_spike(losses[:305], 305) is None


def test_a_loss_that_is_not_finite_is_certain_at_once() -> None:
    losses = [*_losses(2)[:60], float("nan")]
    finding = loss_spike(losses, 61)
    assert finding is not None
    assert finding.certain
    assert finding.evidence["loss"] == "nan"


def test_too_few_losses_say_nothing() -> None:
    assert loss_spike([3.0, 3.0, 3.0, 900.0], 4) is None


def test_gradients_that_are_not_finite() -> None:
    assert nonfinite({}, 4) is None
    assert nonfinite({0: [], 1: []}, 4) is None
    one = {2: [(7, {"parameter": "layers.3.fc1"}), (8, {"parameter": "layers.3.fc1"})]}
    finding = nonfinite(one, 4)
    assert finding is not None
    assert (finding.ranks, finding.step, finding.certain) == ((2,), 8, True)
    assert finding.evidence["steps_in_a_row"] == 2
    everybody = {rank: [(5, {"parameter": "head"})] for rank in range(4)}
    finding = nonfinite(everybody, 4)
    assert finding is not None
    assert finding.ranks == ()
    assert finding.evidence["parameters"] == {"head": 4}


MESH = Mesh(2, 4, 2)
DATA = MESH.groups("data")


def _hashes() -> dict[int, dict[str, int | str]]:
    """Replicas have equal hashes, other places of the mesh have their own."""
    return {
        rank: {
            f"chunk{chunk}.all": hash((chunk, place.tp_rank, place.pp_rank)) for chunk in range(2)
        }
        for rank in range(MESH.world_size)
        for place in [MESH.coordinates(rank)]
    }


def test_equal_replicas_say_nothing() -> None:
    assert differing_replicas(_hashes(), DATA) is None
    assert differing_replicas({}, DATA) is None


@pytest.mark.parametrize("guilty", range(MESH.world_size))
def test_the_minority_differs(guilty: int) -> None:
    hashes = _hashes()
    hashes[guilty]["chunk1.all"] = 99
    finding = differing_replicas(hashes, DATA, step=40)
    assert finding is not None
    assert (finding.ranks, finding.certain, finding.step) == ((guilty,), True, 40)
    assert finding.evidence["buckets"] == {"chunk1.all": [guilty]}


def test_two_replicas_cannot_tell_who() -> None:
    hashes: dict[int, dict[str, int | str]] = {rank: {"all": 1} for rank in range(4)}
    hashes[2]["all"] = 2
    finding = differing_replicas(hashes, [(0, 2), (1, 3)])
    assert finding is not None
    assert (finding.ranks, finding.certain) == ((0, 2), False)


def test_a_tie_names_both_sides() -> None:
    hashes: dict[int, dict[str, int | str]] = {rank: {"all": rank // 2} for rank in range(4)}
    finding = differing_replicas(hashes, [(0, 1, 2, 3)])
    assert finding is not None
    assert (finding.ranks, finding.certain) == ((0, 1, 2, 3), False)


def test_a_replica_that_sent_nothing_is_passed_over() -> None:
    hashes = _hashes()
    del hashes[3]
    assert differing_replicas(hashes, DATA) is None
