"""How the members of a communication group lie on nodes: all that the price of a collective needs.

Ranks are placed tensor fastest, then data, then pipeline (`topology.Mesh`), node after node. All
groups of an axis communicate at the same time, so the `ranks_per_node` members that a group has on
a node have as many of the node's NICs for themselves, and no more (MegaScale 3.6: a NIC a GPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megascale.plan.work.operations import Axis
from megascale.topology import Mesh


@dataclass(frozen=True, slots=True)
class GroupShape:
    """`ranks` members, `ranks_per_node` of them on each node (where uneven: on the emptiest)."""

    ranks: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        assert 1 <= self.ranks_per_node <= self.ranks, (self.ranks, self.ranks_per_node)

    @property
    def crosses_nodes(self) -> bool:
        return self.ranks_per_node < self.ranks

    @property
    def num_nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


@cache
def group_shape(mesh: Mesh, axis: Axis, devices_per_node: int) -> GroupShape:
    """The shape of the groups of `axis` where ranks fill nodes of `devices_per_node` in order.

    "pipeline" is the edge between neighbouring stages, the worst of them; "embedding" the pair of
    first and last stage.
    """
    if axis == "tensor":
        return _strided(mesh.tensor, 1, mesh.world_size, devices_per_node)
    if axis == "data":
        return _strided(mesh.data, mesh.tensor, mesh.world_size, devices_per_node)
    if mesh.pipeline == 1:
        return GroupShape(1, 1)
    return GroupShape(2, 2 if mesh.world_size <= devices_per_node else 1)


def _strided(ranks: int, stride: int, world_size: int, devices_per_node: int) -> GroupShape:
    """Groups of `ranks` members `stride` apart."""
    if ranks == 1 or world_size <= devices_per_node:
        return GroupShape(ranks, ranks)
    if devices_per_node % (ranks * stride) == 0:  # whole groups inside nodes
        return GroupShape(ranks, ranks)
    if stride >= devices_per_node:
        return GroupShape(ranks, 1)
    if devices_per_node % stride == 0 and ranks * stride % devices_per_node == 0:
        return GroupShape(ranks, devices_per_node // stride)
    return GroupShape(ranks, _emptiest(ranks, stride, world_size, devices_per_node))


def _emptiest(ranks: int, stride: int, world_size: int, devices_per_node: int) -> int:
    """Fewest members that a group which crosses nodes has on one of its nodes."""
    fewest, seen = ranks, set()
    for block in range(0, world_size, ranks * stride):
        for first in range(block, block + stride):
            if first % devices_per_node in seen:
                continue
            seen.add(first % devices_per_node)
            nodes = [(first + i * stride) // devices_per_node for i in range(ranks)]
            if nodes[0] != nodes[-1]:
                fewest = min(fewest, *(nodes.count(node) for node in set(nodes)))
        if len(seen) == devices_per_node:
            break
    return fewest
