"""Who keeps a copy of whose slot. Pure.

A rank's copy lies on another node, outside its tensor, data and pipeline groups where there is such
a node: groups are what is evicted together. Every rank keeps the copy of at most one other, so the
memory is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import product

from megascale.topology import Mesh


def keepers(mesh: Mesh, nodes: Sequence[Hashable]) -> list[int | None]:
    """For each global rank the rank that keeps its copy; None where that would be on its own node.

    nodes  of each rank

    A keeper is the rank a fixed distance away, along the axes or in the order of ranks: of the
    distances that are tried, the one with the most copies on other nodes, then the most outside
    their own groups.
    """
    wanted = (mesh.world_size, mesh.world_size)
    best, best_quality = list(range(mesh.world_size)), (0, 0)
    for shifted in _distances(mesh):
        quality = _quality(mesh, nodes, shifted)
        if quality > best_quality:
            best, best_quality = shifted, quality
        if quality == wanted:
            break
    return [keeper if nodes[keeper] != nodes[rank] else None for rank, keeper in enumerate(best)]


def describe(mesh: Mesh, nodes: Sequence[Hashable], kept_by: Sequence[int | None]) -> str:
    """One line for the person who relies on it."""
    pairs = [(rank, keeper) for rank, keeper in enumerate(kept_by) if keeper is not None]
    num_outside = sum(_is_outside(mesh, rank, keeper) for rank, keeper in pairs)
    num_nodes = len(set(nodes))
    if not pairs:
        return f"no copies of memory slots: the ranks are on {num_nodes} node(s)"
    without = f", {mesh.world_size - len(pairs)} rank(s) have none" if None in kept_by else ""
    return (
        f"memory slots of {len(pairs)} rank(s) are copied to another node, {num_outside} of them "
        f"outside their own tensor, data and pipeline groups{without}"
    )


def _distances(mesh: Mesh) -> Iterator[list[int]]:
    """Permutations of the ranks, those that cross groups first."""
    steps = [
        sorted({0, 1, n // 2, n - 1} & set(range(n)), reverse=True)
        for n in (mesh.tensor, mesh.data, mesh.pipeline)
    ]
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    for tensor, data, pipeline in product(*steps):
        yield [
            mesh.global_rank(
                tp_rank=(place.tp_rank + tensor) % mesh.tensor,
                dp_rank=(place.dp_rank + data) % mesh.data,
                pp_rank=(place.pp_rank + pipeline) % mesh.pipeline,
            )
            for place in places
        ]
    world_size = mesh.world_size
    for distance in sorted({2**i for i in range(world_size.bit_length())} | {world_size // 2}):
        yield [(rank + distance) % world_size for rank in range(world_size)]


def _quality(mesh: Mesh, nodes: Sequence[Hashable], shifted: Sequence[int]) -> tuple[int, int]:
    away = [(rank, keeper) for rank, keeper in enumerate(shifted) if nodes[rank] != nodes[keeper]]
    return len(away), sum(_is_outside(mesh, rank, keeper) for rank, keeper in away)


def _is_outside(mesh: Mesh, rank: int, other: int) -> bool:
    """Do the two share no group? Those that do differ along one axis alone."""
    a, b = mesh.coordinates(rank), mesh.coordinates(other)
    differences = (a.tp_rank != b.tp_rank, a.dp_rank != b.dp_rank, a.pp_rank != b.pp_rank)
    return sum(differences) > 1
