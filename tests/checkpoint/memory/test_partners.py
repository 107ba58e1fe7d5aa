"""Copies lie on another node, outside their rank's own groups where that can be."""

from __future__ import annotations

import pytest

from megascale.checkpoint.memory.partners import Place, describe, keepers
from megascale.topology import Mesh


def _nodes(num_ranks: int, per_node: int) -> list[Place]:
    return [Place(f"host {rank // per_node}") for rank in range(num_ranks)]


def _shared(mesh: Mesh, a: int, b: int) -> bool:
    axes = ("tensor", "data", "pipeline")
    return any(a in group and b in group for axis in axes for group in mesh.groups(axis))


@pytest.mark.parametrize(
    ("mesh", "per_node"),
    [
        (Mesh(2, 2, 1), 2),
        (Mesh(2, 1, 2), 2),
        (Mesh(8, 4, 4), 8),
        (Mesh(4, 4, 2), 8),
        (Mesh(8, 16, 8), 8),
        (Mesh(2, 2, 2), 4),
        (Mesh(1, 4, 4), 4),
    ],
)
def test_outside_all_groups(mesh: Mesh, per_node: int) -> None:
    nodes = _nodes(mesh.world_size, per_node)
    kept_by = keepers(mesh, nodes)
    assert sorted(k for k in kept_by if k is not None) == list(range(mesh.world_size))
    for rank, keeper in enumerate(kept_by):
        assert keeper is not None
        assert nodes[rank] != nodes[keeper]
        assert not _shared(mesh, rank, keeper), (rank, keeper)
    assert f"{mesh.world_size} of them outside" in describe(mesh, nodes, kept_by)


@pytest.mark.parametrize(("mesh", "per_node"), [(Mesh(1, 4, 1), 2), (Mesh(8, 2, 1), 4)])
def test_another_node_at_least(mesh: Mesh, per_node: int) -> None:
    nodes = _nodes(mesh.world_size, per_node)
    kept_by = keepers(mesh, nodes)
    assert sorted(k for k in kept_by if k is not None) == list(range(mesh.world_size))
    assert all(nodes[rank] != nodes[k] for rank, k in enumerate(kept_by) if k is not None)


def test_one_node_has_none_and_says_so() -> None:
    places = _nodes(4, 4)
    kept_by = keepers(Mesh(2, 2, 1), places)
    assert kept_by == [None] * 4
    assert describe(Mesh(2, 2, 1), places, kept_by) == (
        "no copies of memory slots: the ranks are on 1 node(s), of one agent each"
    )
    assert keepers(Mesh(), [Place("a")]) == [None]


def test_another_agent_of_the_node_is_better_than_nobody() -> None:
    places = [Place("host", f"agent {rank // 2}") for rank in range(4)]
    kept_by = keepers(Mesh(2, 2, 1), places)
    assert all(k is not None and places[k] != places[rank] for rank, k in enumerate(kept_by))
    assert describe(Mesh(2, 2, 1), places, kept_by) == (
        "memory slots of 4 rank(s) are copied to another agent of their node, which goes with it, "
        "4 of them outside their own tensor, data and pipeline groups"
    )


def test_another_host_comes_before_another_agent() -> None:
    """Two hosts of two agents each: nobody's copy stays on its host, though more distances would
    reach another agent."""
    places = [Place(f"host {rank // 4}", f"agent {rank // 2}") for rank in range(8)]
    mesh = Mesh(2, 2, 2)
    kept_by = keepers(mesh, places)
    assert all(k is not None and places[k].host != places[r].host for r, k in enumerate(kept_by))
    assert not any(_shared(mesh, r, k) for r, k in enumerate(kept_by) if k is not None)


def test_nodes_of_unequal_size_copy_what_they_can() -> None:
    nodes = [Place(host) for host in "aaab"]
    kept_by = keepers(Mesh(1, 4, 1), nodes)
    assert sum(keeper is not None for keeper in kept_by) == 2  # 3 to some rank of node 0, and back
    assert "2 rank(s) have none" in describe(Mesh(1, 4, 1), nodes, kept_by)


def test_a_world_of_twelve_thousand_ranks() -> None:
    mesh = Mesh(8, 192, 8)
    kept_by = keepers(mesh, _nodes(mesh.world_size, 8))
    assert None not in kept_by
