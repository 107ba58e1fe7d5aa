"""Members of groups by the names that the recorder writes."""

from __future__ import annotations

import pytest

from megascale.telemetry.timeline.groups import Groups
from megascale.topology import Mesh

MESH = Mesh(tensor=2, data=3, pipeline=4)


@pytest.mark.parametrize("axis", ["tensor", "data", "pipeline"])
def test_along_an_axis_they_are_the_meshs(axis: str) -> None:
    groups = Groups(MESH)
    of_mesh = {rank: tuple(group) for group in MESH.groups(axis) for rank in group}
    assert {rank: groups.of(axis, rank) for rank in range(MESH.world_size)} == of_mesh


def test_the_others() -> None:
    groups = Groups(MESH)
    for rank in range(MESH.world_size):
        assert groups.of("world", rank) == tuple(range(24))
        assert groups.of("head", rank) == groups.of("pipeline", rank)
        (vocabulary,) = [g for g in MESH.vocabulary_groups() if rank in g]
        assert groups.of("vocabulary", rank) == tuple(vocabulary)
        assert groups.of("nobody's", rank) is None


def test_channels_are_between_stages_of_the_ranks_own_pipeline() -> None:
    groups = Groups(MESH)
    edges = set(MESH.edges())
    for rank in range(MESH.world_size):
        stage = MESH.coordinates(rank).pp_rank
        pair = groups.channel(f"{stage}->{(stage + 1) % 4} activation", rank)
        assert pair in edges
        assert pair is not None
        assert pair[0] == rank
        assert groups.channel(f"{(stage + 1) % 4}->{stage} gradient", rank) == pair[::-1]
    for other in ("data", "1->9 activation", "x->1", "->"):
        assert groups.channel(other, 0) is None
