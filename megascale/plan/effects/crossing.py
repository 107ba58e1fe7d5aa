"""Which flows of a job leave their switch, and how many bytes each axis moves (MegaScale 2, 3.6).

Ranks fill nodes in order; a NIC of a node is on rail i when it hangs on switch i of the node's set,
so that a set of switches behaves as one switch a rail and every rail looks alike. A node whose
neighbour along an axis hangs on another set sends one flow a rail over the uplinks, at the rate of
the NIC. Flows of one axis are taken to run at one time and alone: data-parallel rings run at a
step's end together, transfers of a pipeline because all its replicas run the same schedule.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megascale.plan.case import Case
from megascale.plan.effects.ecmp import Uplinks, slowest_flow
from megascale.plan.effects.interval import Interval
from megascale.topology import Mesh
from megascale.units import matmul_parameters

RingAxis = Literal["tensor", "data", "pipeline"]
RING_AXES: tuple[RingAxis, ...] = ("tensor", "data", "pipeline")


def axis_bytes(case: Case) -> dict[RingAxis, float]:
    """Bytes that a device sends in a step along each axis, by rings; weights of a placement.

    data      gradients reduced (with ZeRO-2 and 3 in every micro-batch) and parameters gathered
    pipeline  activations to the next stage and gradients to the one before, each chunk
    tensor    two all-gathers and two reduce-scatters a layer and direction
    """
    job, layout, software = case.job, case.layout, case.software
    micro_batches = case.micro_batches
    weights = matmul_parameters(job.model) / (layout.tensor * layout.pipeline)
    activation = case.micro_batch_tokens * job.model.hidden_size * job.dtype_bytes
    reduces = micro_batches if layout.zero_stage >= 2 else 1
    gathers = 2 * micro_batches if layout.zero_stage == 3 else 1
    moved = reduces * software.grad_reduce_bytes + gathers * job.dtype_bytes
    layers = job.model.num_layers / layout.pipeline
    return {
        "tensor": 8 * layers * micro_batches * activation * _of_ring(layout.tensor),
        "data": weights * moved * _of_ring(layout.data),
        "pipeline": (
            2 * layout.virtual * micro_batches * activation / layout.tensor
            if layout.pipeline > 1
            else 0.0
        ),
    }


def _of_ring(degree: int) -> float:
    """Share of a tensor that a member of a ring sends."""
    return (degree - 1) / degree


@lru_cache(maxsize=256)
def node_edges(mesh: Mesh, devices_per_node: int, axis: RingAxis) -> NDArray[np.int64]:
    """Distinct (source node, destination node) of the rings of `axis`, (num_edges, 2).

    The ring of a pipeline is closed: interleaved schedules send from the last stage to the first.
    """
    ranks = np.arange(mesh.world_size)
    stride = {"tensor": 1, "data": mesh.tensor, "pipeline": mesh.tensor * mesh.data}[axis]
    degree = int(getattr(mesh, axis))
    place = ranks // stride % degree
    following = ranks + np.where(place == degree - 1, -(degree - 1) * stride, stride)
    pairs = np.stack([ranks // devices_per_node, following // devices_per_node], axis=1)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)


def leaving(edges: NDArray[np.int64], switch_of: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nodes that send to a node under another switch, by switch (indices of `switch_of`)."""
    outside = edges[switch_of[edges[:, 0]] != switch_of[edges[:, 1]]]
    sources = np.unique(outside[:, 0])
    return np.bincount(switch_of[sources], minlength=int(switch_of.max()) + 1)


def crossing_share(edges: NDArray[np.int64], switch_of: NDArray[np.int64]) -> float:
    """Share of the edges between nodes that leave their switch; 0 where there are none."""
    if not len(edges):
        return 0.0
    return float(np.mean(switch_of[edges[:, 0]] != switch_of[edges[:, 1]]))


def cut_groups(
    mesh: Mesh, devices_per_node: int, axis: RingAxis, switch_of: NDArray[np.int64]
) -> float:
    """Share of the groups of an axis that are not whole under one switch."""
    of_rank = switch_of[np.arange(mesh.world_size) // devices_per_node]
    shape = (mesh.pipeline, mesh.data, mesh.tensor)  # tensor fastest, then data
    place = {"pipeline": 0, "data": 1, "tensor": 2}[axis]
    groups = of_rank.reshape(shape)
    return float(np.mean(groups.min(axis=place) != groups.max(axis=place)))


def axis_share(
    mesh: Mesh,
    devices_per_node: int,
    axis: RingAxis,
    switch_of: NDArray[np.int64],
    uplinks: Uplinks,
    *,
    rails: int = 1,
    nics_a_rail: int = 1,
    seed: int = 0,
) -> Interval:
    """Share of its bandwidth that the slowest flow of an axis gets; 1 where all stay inside.

    switch_of    switch (or set of switches) of each node, by the node's place in the order of ranks
    nics_a_rail  that a node has on one switch, each with a flow of its own
    """
    counts = Counter(leaving(node_edges(mesh, devices_per_node, axis), switch_of).tolist())
    switches = {nics_a_rail * nodes: rails * number for nodes, number in counts.items()}
    return slowest_flow(uplinks, switches, seed=seed)
