"""Shapes of groups against the nodes that `Mesh` puts their ranks on."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.machine.groups import GroupShape, group_shape
from megascale.plan.work.operations import Axis
from megascale.topology import Mesh

DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


def expected(groups: list[list[int]], per_node: int) -> GroupShape:
    """The fewest members that a group which crosses nodes has on one of them."""
    fewest = ranks = len(groups[0])
    for group in groups:
        nodes = [rank // per_node for rank in group]
        if len(set(nodes)) > 1:
            fewest = min(fewest, *(nodes.count(node) for node in nodes))
    return GroupShape(ranks, fewest)


@given(DEGREES, DEGREES, st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4, 6, 8]))
def test_shapes_are_those_of_the_mesh(tensor: int, data: int, pipeline: int, per_node: int) -> None:
    mesh = Mesh(tensor, data, pipeline)
    assert group_shape(mesh, "tensor", per_node) == expected(mesh.groups("tensor"), per_node)
    assert group_shape(mesh, "data", per_node) == expected(mesh.groups("data"), per_node)


@given(DEGREES, DEGREES, st.sampled_from([2, 3, 4]), st.sampled_from([2, 4, 8]))
def test_pairs_of_stages_are_the_worst_of_the_mesh(
    tensor: int, data: int, pipeline: int, per_node: int
) -> None:
    mesh = Mesh(tensor, data, pipeline)
    edges = [list(edge) for edge in mesh.edges()]
    assert group_shape(mesh, "pipeline", per_node) == expected(edges, per_node)


def test_the_paper_s_175b_on_12288_devices() -> None:
    mesh = Mesh(tensor=8, data=192, pipeline=8)
    assert group_shape(mesh, "tensor", 8) == GroupShape(8, 8)
    assert group_shape(mesh, "data", 8) == GroupShape(192, 1)
    assert group_shape(mesh, "pipeline", 8) == GroupShape(2, 1)
    assert group_shape(mesh, "embedding", 8) == GroupShape(2, 1)


def test_members_of_a_node_share_its_links() -> None:
    mesh = Mesh(tensor=2, data=64, pipeline=1)
    assert group_shape(mesh, "data", 8) == GroupShape(64, 4)
    assert group_shape(mesh, "data", 8).num_nodes == 16
    assert group_shape(Mesh(tensor=16, data=1, pipeline=1), "tensor", 8) == GroupShape(16, 8)


@pytest.mark.parametrize("axis", get_args(Axis))
def test_one_device_is_alone(axis: Axis) -> None:
    assert group_shape(Mesh(1, 1, 1), axis, 8) == GroupShape(1, 1)
