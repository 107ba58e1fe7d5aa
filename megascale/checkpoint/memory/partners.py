"""Who keeps a copy of whose slot. Pure.

A rank's copy lies on another host, outside its tensor, data and pipeline groups where there is such
a host: groups are what is evicted together. Else on any other host; else with any other agent of
its own, whose memory outlives that of this one; it is said which. Every rank keeps the copy of at
most one other, so the memory is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megascale.topology import Mesh


@dataclass(frozen=True)
class Place:
    """Where a rank's memory is: the machine, and the agent on it that owns the slots."""

    host: str
    agent: str = ""


def keepers(mesh: Mesh, places: Sequence[Place]) -> list[int | None]:
    """For each global rank the rank that keeps its copy; None where that would be its own agent's.

    places  of each rank

    A keeper is the rank a fixed distance away, along the axes or in the order of ranks: of the
    distances that are tried, the one with the most copies on other hosts, then the most of those
    outside their own groups, then the same for other agents.
    """
    wanted = (mesh.world_size,) * 4
    best = list(range(mesh.world_size))
    best_quality: tuple[int, ...] = (0, 0, 0, 0)
    for shifted in _distances(mesh):
        quality = _quality(mesh, places, shifted)
        if quality > best_quality:
            best, best_quality = shifted, quality
        if quality == wanted:
            break
    return [keeper if places[keeper] != places[rank] else None for rank, keeper in enumerate(best)]


def describe(mesh: Mesh, places: Sequence[Place], kept_by: Sequence[int | None]) -> str:
    """One line for the person who relies on it."""
    pairs = [(rank, keeper) for rank, keeper in enumerate(kept_by) if keeper is not None]
    if not pairs:
        num_hosts = len({place.host for place in places})
        return f"no copies of memory slots: the ranks are on {num_hosts} node(s), of one agent each"
    said = []
    for is_away, where in (
        (True, "another node"),
        (False, "another agent of their node, which goes with it"),
    ):
        there = [(r, k) for r, k in pairs if (places[r].host != places[k].host) == is_away]
        if there:
            num_outside = sum(_is_outside(mesh, rank, keeper) for rank, keeper in there)
            said.append(
                f"memory slots of {len(there)} rank(s) are copied to {where}, {num_outside} of "
                "them outside their own tensor, data and pipeline groups"
            )
    if None in kept_by:
        said.append(f"{mesh.world_size - len(pairs)} rank(s) have none")
    return ", ".join(said)


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


def _quality(mesh: Mesh, places: Sequence[Place], shifted: Sequence[int]) -> tuple[int, ...]:
    """To another host, of those outside; to another agent, of those outside."""
    pairs = [*enumerate(shifted)]
    away = [(rank, k) for rank, k in pairs if places[rank].host != places[k].host]
    other = [(rank, k) for rank, k in pairs if places[rank] != places[k]]
    outside = [sum(_is_outside(mesh, rank, k) for rank, k in chosen) for chosen in (away, other)]
    return len(away), outside[0], len(other), outside[1]


def _is_outside(mesh: Mesh, rank: int, other: int) -> bool:
    """Do the two share no group? Those that do differ along one axis alone."""
    a, b = mesh.coordinates(rank), mesh.coordinates(other)
    differences = (a.tp_rank != b.tp_rank, a.dp_rank != b.dp_rank, a.pp_rank != b.pp_rank)
    return sum(differences) > 1
