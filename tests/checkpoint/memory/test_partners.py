"""Copies lie on another node, outside their rank's own groups where that can be."""

from __future__ import annotations

import pytest

from megascale.checkpoint.memory.partners import describe, keepers
from megascale.topology import Mesh


def _nodes(num_ranks: int, per_node: int) -> list[int]:
    return [rank // per_node for rank in range(num_ranks)]


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
    kept_by = keepers(Mesh(2, 2, 1), [0] * 4)
    assert kept_by == [None] * 4
    assert describe(Mesh(2, 2, 1), [0] * 4, kept_by) == (
        "no copies of memory slots: the ranks are on 1 node(s)"
    )
    assert keepers(Mesh(), ["a"]) == [None]


def test_nodes_of_unequal_size_copy_what_they_can() -> None:
    nodes = [0, 0, 0, 1]
    kept_by = keepers(Mesh(1, 4, 1), nodes)
    assert sum(keeper is not None for keeper in kept_by) == 2  # 3 to some rank of node 0, and back
    assert "2 rank(s) have none" in describe(Mesh(1, 4, 1), nodes, kept_by)


def test_a_world_of_twelve_thousand_ranks() -> None:
    mesh = Mesh(8, 192, 8)
    kept_by = keepers(mesh, _nodes(mesh.world_size, 8))
    assert None not in kept_by
