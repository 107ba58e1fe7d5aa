"""Edges, flows and bytes of the axes against walks over all ranks and hand computation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megascale.config import ModelConfig
from megascale.plan.case import Case, Job, Layout, Software
from megascale.plan.effects.crossing import (
    RING_AXES,
    RingAxis,
    axis_bytes,
    axis_share,
    crossing_share,
    cut_groups,
    leaving,
    node_edges,
)
from megascale.plan.effects.ecmp import Uplinks, slowest_flow
from megascale.topology import Mesh

MODEL = ModelConfig(preset="gpt3-13b")
UPLINKS = Uplinks(4, 400.0, 200.0)


@pytest.mark.parametrize("mesh", [Mesh(8, 4, 2), Mesh(2, 6, 2), Mesh(4, 3, 4), Mesh(16, 2, 2)])
@pytest.mark.parametrize("axis", RING_AXES)
def test_edges_are_those_of_walking_all_rings(mesh: Mesh, axis: RingAxis) -> None:
    walked = {
        (source // 8, destination // 8)
        for ranks in mesh.groups(axis)
        for source, destination in zip(ranks, ranks[1:] + ranks[:1], strict=True)
        if source // 8 != destination // 8
    }
    assert {(int(a), int(b)) for a, b in node_edges(mesh, 8, axis)} == walked


@pytest.mark.parametrize("axis", RING_AXES)
def test_groups_that_are_cut(axis: RingAxis) -> None:
    mesh = Mesh(4, 3, 4)
    switch_of = np.array([0, 1, 1, 0, 2, 2])
    cut = [len({int(switch_of[rank // 8]) for rank in ranks}) > 1 for ranks in mesh.groups(axis)]
    assert cut_groups(mesh, 8, axis, switch_of) == pytest.approx(np.mean(cut))


def test_flows_by_hand() -> None:
    """Two stages of four nodes: a ring of four under switches a a b b sends two flows, one of each
    switch; its pipelines to the same switches send none."""
    mesh, switch_of = Mesh(8, 4, 2), np.array([0, 0, 1, 1, 0, 0, 1, 1])
    data, pipeline = (node_edges(mesh, 8, axis) for axis in ("data", "pipeline"))
    assert leaving(data, switch_of).tolist() == [2, 2]  # one of each stage
    assert leaving(pipeline, switch_of).tolist() == [0, 0]
    assert crossing_share(data, switch_of) == 0.5
    assert crossing_share(node_edges(mesh, 8, "tensor"), switch_of) == 0.0
    share = axis_share(mesh, 8, "data", switch_of, UPLINKS, rails=8)
    assert share == slowest_flow(UPLINKS, {2: 16})


def _case(layout: Layout, **software: int) -> Case:
    return Case(Job(MODEL, 64, 2048), layout, replace(Software(), **software))  # type: ignore[arg-type]


def test_bytes_by_hand() -> None:
    layout = Layout(tensor=4, pipeline=2, virtual=5, data=8)
    found = axis_bytes(_case(layout))
    weights = 40 * 12 * MODEL.hidden_size**2 + MODEL.vocab * MODEL.hidden_size
    assert found["data"] == pytest.approx(weights / 8 * (4 + 2) * 7 / 8)
    activation = 2048 * MODEL.hidden_size * 2
    assert found["pipeline"] == pytest.approx(2 * 5 * 8 * activation / 4)
    assert found["tensor"] == pytest.approx(8 * 20 * 8 * activation * 3 / 4)
    assert axis_bytes(_case(layout, grad_reduce_bytes=2))["data"] < found["data"]


def test_sharded_gradients_are_reduced_in_every_micro_batch() -> None:
    layout = Layout(tensor=4, pipeline=2, data=8)
    one, two, three = (axis_bytes(_case(replace(layout, zero_stage=z)))["data"] for z in (1, 2, 3))
    assert two / one == pytest.approx((8 * 4 + 2) / 6)
    assert three / one == pytest.approx((8 * 4 + 2 * 8 * 2) / 6)


def test_an_axis_of_one_moves_nothing() -> None:
    found = axis_bytes(_case(Layout(data=8)))
    assert found["tensor"] == found["pipeline"] == 0.0
