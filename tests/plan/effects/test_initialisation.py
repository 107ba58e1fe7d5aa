"""Calls to the store against a count over real rank lists, and the paper's four figures."""

from __future__ import annotations

import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.initialisation import (
    PAPER_MESH,
    call_s,
    creation_time,
    fitted_on_the_paper,
    groups_of,
    store_calls,
)
from megascale.topology import Mesh

LARGE = Mesh(tensor=8, data=192, pipeline=8)


def _model_groups(mesh: Mesh) -> list[list[int]]:
    replicas: dict[int, list[int]] = {}
    for rank in range(mesh.world_size):
        replicas.setdefault(mesh.coordinates(rank).dp_rank, []).append(rank)
    return list(replicas.values())


@pytest.mark.parametrize("mesh", [Mesh(2, 3, 2), Mesh(1, 4, 1), Mesh(4, 1, 3)])
def test_calls_are_those_of_walking_all_groups(mesh: Mesh) -> None:
    groups = [g for axis in ("tensor", "data", "pipeline") for g in mesh.groups(axis)]
    groups = [g for g in groups + _model_groups(mesh) if len(g) > 1]
    barriers = ids = own = 0
    for group in groups:
        barriers += sum(3 for _ in range(mesh.world_size)) + 1
        ids += len(group)
        own += sum(3 for _ in group) + 1
    old = store_calls(mesh, "world_barriers")
    assert (old.num_groups, old.calls) == (len(groups), barriers + ids)
    assert old.arrivals == len(groups) * mesh.world_size
    new = store_calls(mesh, "ordered")
    at_the_end = 3 * mesh.world_size + 1
    assert (new.calls, new.least) == (ids + own + at_the_end, ids + at_the_end)


def test_groups_of_the_papers_2048() -> None:
    """256 tensor, 64 data, 256 pipeline and 32 model groups: 608, and 1.25 million arrivals."""
    found = groups_of(PAPER_MESH)
    assert {kind: number for kind, (number, _) in found.items()} == {
        "tensor": 256,
        "data": 64,
        "pipeline": 256,
        "model": 32,
    }
    assert store_calls(PAPER_MESH, "world_barriers").arrivals == 608 * 2048
    assert store_calls(LARGE, "world_barriers").num_groups == 3328
    assert groups_of(PAPER_MESH, ("embedding",)) == {"embedding": (256, 2)}


def test_the_papers_ladder_from_two_fitted_constants() -> None:
    seconds = fitted_on_the_paper()
    tcp = creation_time(PAPER_MESH, "world_barriers", seconds["tcp"])
    redis = creation_time(PAPER_MESH, "world_barriers", seconds["redis"])
    assert tcp.value == pytest.approx(1047.0)
    assert redis.value == pytest.approx(361.0)
    # 0.28 and 0.10 ms a call: 3,600 and 10,400 calls a second
    assert seconds["tcp"] == pytest.approx(0.28e-3, rel=0.01)
    assert seconds["redis"] == pytest.approx(0.0963e-3, rel=0.01)
    # predicted: under 5 s, and beyond 10,000 GPUs under 30 s
    ordered = creation_time(PAPER_MESH, "ordered", seconds["redis"])
    assert 1.0 < ordered.low < ordered.high < 5.0
    assert creation_time(LARGE, "ordered", seconds["redis"]).high < 30.0


def test_the_old_form_is_quadratic_and_the_new_one_linear() -> None:
    seconds = fitted_on_the_paper()["tcp"]
    old = [creation_time(m, "world_barriers", seconds).value for m in (PAPER_MESH, LARGE)]
    new = [creation_time(m, "ordered", seconds).value for m in (PAPER_MESH, LARGE)]
    assert old[1] == pytest.approx(34_400, rel=0.01)  # 9.6 hours
    assert old[1] / old[0] == pytest.approx(6 * 3328 / 608, rel=0.01)
    assert new[1] / new[0] == pytest.approx(6.0, rel=0.02)


def test_one_rank_creates_nothing() -> None:
    calls = store_calls(Mesh(), "world_barriers")
    assert (calls.num_groups, calls.arrivals, calls.calls) == (0, 0, 0)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="form 'both' of creating groups; legal: world_barriers"):
        store_calls(PAPER_MESH, "both")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kind 'expert'; legal: tensor, data, pipeline, model"):
        groups_of(PAPER_MESH, ("expert",))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seconds_a_call is 0; legal is more than 0"):
        creation_time(PAPER_MESH, "ordered", 0.0)
    with pytest.raises(ConfigError, match="seconds of a creation is -1"):
        call_s(-1.0, store_calls(PAPER_MESH, "ordered"))
