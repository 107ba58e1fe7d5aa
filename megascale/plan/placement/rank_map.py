"""The order of nodes that keeps the heaviest groups under one switch (MegaScale 2, 3.6).

Node r of the order runs ranks r x devices_per_node and the following. Ranks are tensor fastest,
then data, then pipeline, so that nodes lie in a grid: a row is a stage's data-parallel rings, a
column a pipeline. Switches have to be laid over that grid, and what they cut costs: a ring that
leaves a switch shares its uplinks. Tiles of all widths that divide a row are tried, from whole rows
(data stays inside) over blocks to columns (pipelines stay inside), each filled straight on or with
whole rows of a tile under one switch where they fit. The cheapest is taken; of equals the first, so
that the same file gives the same order.

The cost of an order is the bytes of each axis over the share of the bandwidth that its slowest flow
has by the ECMP model, in closed form: bytes that stay inside count once, bytes that cross count by
what the conflicts make of them. What crosses also meets on the switches above, which that model
leaves out: a quarter of the bytes more for groups that are cut, because a ring runs at its slowest
edge, and a quarter for the share of edges that cross; both chosen. So heavy groups are kept whole
unless cutting them spares others much. Of equals: fewer bytes between pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megascale.errors import ConfigError
from megascale.plan.effects.crossing import (
    RING_AXES,
    RingAxis,
    axis_share,
    crossing_share,
    cut_groups,
    node_edges,
)
from megascale.plan.effects.interval import Interval, check_number
from megascale.plan.placement.topology import Topology
from megascale.topology import Mesh

# Bytes where nobody knows the job: data-parallel rings first, as in the paper, then pipelines.
DATA_FIRST: Mapping[RingAxis, float] = {"tensor": 8.0, "data": 4.0, "pipeline": 1.0}

ABOVE = 0.25  # of the bytes of groups that are cut, and of edges that cross; see the module

_Order = NDArray[np.int64]  # switch of each place in the order of nodes


@dataclass(frozen=True)
class Traffic:
    """What an order makes of a job's traffic.

    share     of its bandwidth that the slowest flow of an axis gets, by the ECMP model
    crossing  share of an axis's edges between nodes that leave their switch
    cut       share of an axis's groups that are not whole under one switch
    slow_down  of all bytes between nodes, over what they would take without conflicts
    """

    share: Mapping[RingAxis, Interval]
    crossing: Mapping[RingAxis, float]
    cut: Mapping[RingAxis, float]
    slow_down: float


@dataclass(frozen=True)
class RankMap:
    """`order[r]` runs the ranks of node r; `before` is what the order as given would be."""

    order: tuple[str, ...]
    before: Traffic
    after: Traffic

    def __str__(self) -> str:
        lines = []
        for name, traffic in (("as given", self.before), ("by topology", self.after)):
            parts = [
                f"{axis}: {traffic.cut[axis]:.0%} of the groups and {traffic.crossing[axis]:.0%} "
                f"of their edges leave a switch, slowest flow {traffic.share[axis]}"
                for axis in RING_AXES
                if axis in traffic.share
            ]
            lines.append(f"{name:<12} {'; '.join(parts)}")
        lines.append(
            f"{'gain':<12} bytes between nodes take {self.gain:.2f} times as long as given than by "
            "topology (simulated)"
        )
        return "\n".join(lines)

    @property
    def gain(self) -> float:
        """How many times longer the bytes between nodes take in the order as given."""
        return self.before.slow_down / self.after.slow_down


def rank_map(
    topology: Topology,
    mesh: Mesh,
    devices_per_node: int,
    *,
    nodes: Sequence[str] | None = None,
    num_bytes: Mapping[RingAxis, float] = DATA_FIRST,
    first: str | None = None,
) -> RankMap:
    """The order of `nodes` (default: the topology's) for `mesh`. Raises ConfigError.

    num_bytes  of the axes, see `crossing.axis_bytes`
    first      a node that must be the first: where rank 0 has to be
    More nodes than the mesh needs are chosen from.
    """
    given = list(nodes) if nodes is not None else topology.nodes
    topology = topology.of(given)
    needed = _num_nodes(mesh, devices_per_node)
    if len(given) < needed:
        raise ConfigError(
            f"{mesh.world_size} ranks on nodes of {devices_per_node} need {needed} nodes, there "
            f"are {len(given)}: {needed - len(given)} missing; add nodes or lower the degrees"
        )
    if first is not None and first not in given:
        raise ConfigError(f"the first node is to be {first}, which is none of the job's")
    for axis, weight in num_bytes.items():
        check_number(f"bytes of axis {axis}", weight, least=0.0)
    grid = _Grid(topology, mesh, devices_per_node, num_bytes)
    before = grid.of_names(_with_first(given, first)[:needed])
    best, best_key = before, grid.key(before)
    ahead = None if first is None else grid.of_names([first])[0]
    for order in _orders(topology, mesh, devices_per_node, needed):
        pinned = _pin(order, ahead)
        key = grid.key(pinned)
        if key < best_key:
            best, best_key = pinned, key
    names = _names_of(best, topology, first)
    return RankMap(names, grid.traffic(before), grid.traffic(best))


def traffic_of(
    order: Sequence[str],
    topology: Topology,
    mesh: Mesh,
    devices_per_node: int,
    num_bytes: Mapping[RingAxis, float] = DATA_FIRST,
) -> Traffic:
    """What an order that somebody else made costs."""
    _num_nodes(mesh, devices_per_node)
    grid = _Grid(topology.of(list(order)), mesh, devices_per_node, num_bytes)
    return grid.traffic(grid.of_names(order))


def _num_nodes(mesh: Mesh, devices_per_node: int) -> int:
    if devices_per_node < 1:
        raise ConfigError(f"devices_per_node is {devices_per_node}; legal is 1 or more")
    if mesh.world_size > devices_per_node and mesh.world_size % devices_per_node:
        below = mesh.world_size // devices_per_node * devices_per_node
        raise ConfigError(
            f"{mesh.world_size} ranks do not fill nodes of {devices_per_node}; nearest legal: "
            f"{below} or {below + devices_per_node} ranks"
        )
    return -(-mesh.world_size // devices_per_node)


class _Grid:
    """Costs of orders of one job on one topology."""

    def __init__(
        self,
        topology: Topology,
        mesh: Mesh,
        devices_per_node: int,
        num_bytes: Mapping[RingAxis, float],
    ) -> None:
        self._topology, self._mesh, self._per_node = topology, mesh, devices_per_node
        self._bytes = num_bytes
        self._edges = {axis: node_edges(mesh, devices_per_node, axis) for axis in RING_AXES}
        self._edges = {axis: edges for axis, edges in self._edges.items() if len(edges)}
        pods = {pod: i for i, pod in enumerate(sorted({s.pod for s in topology.switches}))}
        self._pod_of = np.array([pods[s.pod] for s in topology.switches])

    def of_names(self, order: Sequence[str]) -> _Order:
        index = {s.name: i for i, s in enumerate(self._topology.switches)}
        switch_of = self._topology.switch_of
        return np.array([index[switch_of[node]] for node in order])

    def key(self, order: _Order) -> tuple[float, float]:
        between_pods = cost = 0.0
        for axis, edges in self._edges.items():
            weight = self._bytes.get(axis, 0.0)
            conflicts = 1.0 / self._share(axis, order, queue_pairs=1).value
            crossing = crossing_share(edges, order)
            above = crossing + cut_groups(self._mesh, self._per_node, axis, order)
            cost += weight * (conflicts + ABOVE * above)
            between_pods += weight * crossing_share(edges, self._pod_of[order])
        whole = sum(self._bytes.values()) or 1.0  # equal costs are to look equal
        return round(cost / whole, 9), round(between_pods / whole, 9)

    def traffic(self, order: _Order) -> Traffic:
        pairs = self._topology.queue_pairs
        share = {axis: self._share(axis, order, queue_pairs=pairs) for axis in self._edges}
        crossing = {axis: crossing_share(edges, order) for axis, edges in self._edges.items()}
        cut = {axis: cut_groups(self._mesh, self._per_node, axis, order) for axis in self._edges}
        weights = {axis: self._bytes.get(axis, 0.0) for axis in self._edges}
        whole = sum(weights.values())
        slowed = sum(weight / share[axis].value for axis, weight in weights.items())
        return Traffic(share, crossing, cut, slowed / whole if whole else 1.0)

    def _share(self, axis: RingAxis, order: _Order, *, queue_pairs: int) -> Interval:
        uplinks = replace(self._topology.uplinks, queue_pairs=queue_pairs)
        rails = self._topology.rails
        return axis_share(self._mesh, self._per_node, axis, order, uplinks, rails=rails)


def _orders(topology: Topology, mesh: Mesh, devices_per_node: int, needed: int) -> Iterator[_Order]:
    """Candidate orders, the whole rows first."""
    sizes = np.array([len(switch.nodes) for switch in topology.switches])
    row = mesh.tensor * mesh.data // devices_per_node
    if row < 1 or needed % row:
        row = 1 if row < 1 else needed
    columns = needed // row
    by_size = _largest_first(topology)
    places = np.arange(needed).reshape(columns, row)
    for width in (w for w in range(row, 0, -1) if row % w == 0):
        tiles = [places[:, left : left + width] for left in range(0, row, width)]
        walk = np.concatenate([tile.reshape(-1) for tile in tiles])
        for switches in (by_size, list(range(len(sizes)))):
            for unit in (width, 1):
                yield _fill(walk, unit, switches, sizes)


def _largest_first(topology: Topology) -> list[int]:
    """Switches of a pod together, pods and switches by their size; the file's order where equal."""
    of_pod: dict[str, int] = {}
    for switch in topology.switches:
        of_pod[switch.pod] = of_pod.get(switch.pod, 0) + len(switch.nodes)
    pods = sorted(of_pod, key=lambda pod: -of_pod[pod])  # stable
    indices = range(len(topology.switches))
    return sorted(
        indices,
        key=lambda i: (
            pods.index(topology.switches[i].pod),
            -len(topology.switches[i].nodes),
        ),
    )


def _fill(
    walk: NDArray[np.int64], unit: int, switches: Sequence[int], sizes: NDArray[np.int64]
) -> _Order:
    """Lay `walk`, in pieces of `unit` places, over the switches: whole pieces first, as many as
    each holds, then what is left over the rest, largest remainder first, so that few are cut."""
    order = np.full(len(walk), -1)
    left, at = sizes.copy(), 0
    for switch in switches:
        take = min(left[switch] // unit * unit, (len(walk) - at) // unit * unit)
        order[walk[at : at + take]] = switch
        left[switch] -= take
        at += take
    for switch in sorted(switches, key=lambda i: -left[i]):
        take = min(int(left[switch]), len(walk) - at)
        order[walk[at : at + take]] = switch
        at += take
    assert at == len(walk), (at, len(walk))
    return order


def _pin(order: _Order, ahead: int | None) -> _Order:
    """The same with switch `ahead` at the first place: exchanged with the one that is there.

    Where it has fewer places than that one, a place is exchanged, and cuts what lay there.
    """
    if ahead is None or order[0] == ahead:
        return order
    pinned, there = order.copy(), order[0]
    places, others = np.flatnonzero(order == ahead), np.flatnonzero(order == there)
    if len(places) == len(others):
        pinned[places], pinned[others] = there, ahead
        return pinned
    if len(places):
        pinned[places[0]] = there
    pinned[0] = ahead
    return pinned


def _with_first(names: list[str], first: str | None) -> list[str]:
    return names if first is None else [first, *(name for name in names if name != first)]


def _names_of(order: _Order, topology: Topology, first: str | None) -> tuple[str, ...]:
    """Nodes of each switch in their order, `first` before all."""
    waiting = [
        _with_first(list(s.nodes), first if first in s.nodes else None) for s in topology.switches
    ]
    heads = [iter(names) for names in waiting]
    return tuple(next(heads[switch]) for switch in order)
