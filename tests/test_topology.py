"""The mesh: groups tile the world, coordinates and ranks are inverse, the order is the paper's."""

from __future__ import annotations

import pytest

from megascale.topology import AXES, Coordinates, Mesh


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2, 3, 4), Mesh(8, 4, 8), Mesh(1, 5, 2)])
def test_groups_tile_the_world_along_each_axis(mesh: Mesh) -> None:
    for axis in AXES:
        groups = mesh.groups(axis)
        assert sorted(r for ranks in groups for r in ranks) == list(range(mesh.world_size))
        assert {len(ranks) for ranks in groups} == {getattr(mesh, axis)}


def test_tensor_is_fastest_then_data_then_pipeline() -> None:
    mesh = Mesh(tensor=2, data=3, pipeline=4)
    assert mesh.groups("tensor")[0] == [0, 1]
    assert mesh.groups("data")[0] == [0, 2, 4]
    assert mesh.groups("pipeline")[0] == [0, 6, 12, 18]
    assert mesh.coordinates(23) == Coordinates(tp_rank=1, dp_rank=2, pp_rank=3)
    for rank in range(mesh.world_size):
        place = mesh.coordinates(rank)
        assert rank == mesh.global_rank(
            tp_rank=place.tp_rank, dp_rank=place.dp_rank, pp_rank=place.pp_rank
        )


def test_embedding_groups_join_first_and_last_stage() -> None:
    assert Mesh(2, 1, 3).embedding_groups() == [[0, 4], [1, 5]]
    assert Mesh(2, 2, 1).embedding_groups() == []


def test_edges_form_a_ring_of_each_pipeline() -> None:
    assert list(Mesh(1, 1, 3).edges()) == [(0, 1), (1, 2), (2, 0)]
    assert list(Mesh(2, 1, 2).edges()) == [(0, 2), (2, 0), (1, 3), (3, 1)]
    assert list(Mesh(4, 2, 1).edges()) == []
