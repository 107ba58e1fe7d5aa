"""The store calls of group creation, in torch's order (MegaScale 3.5).

`EveryGroup` is what the paper starts from: each rank passes through every group of the cluster,
member or not, and all ranks meet at a barrier on the store after each. The groups are those of
Megatron-LM at the paper's commit 285068c8, in its order. `OwnGroups` is `megascale train`: a rank
creates what it belongs to, and meets nobody else.

A barrier has two forms. "poll" is torch's up to 2.0, the one that the paper's time had: add
oneself, then read the count every 10 ms until all are there. "wait" is that of torch since, where
TORCH_DIST_INIT_BARRIER=1 asks for it: the last one sets a key that the others wait for.

A communicator of NCCL costs its members an id: one sets it, the others get it. Above 128 members
there is one for each 128 (torch since 2.6), and everybody gets all of them. Both orders have these
calls, for the groups that a rank belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megascale.topology import Mesh
from megascale.train.bench_init.calls import Calls, Mark, Pause, Steps

Barrier = Literal["poll", "wait"]
JOINED, GROUPS, DONE = "joined", "groups", "done"
"""All ranks have a connection; have passed every barrier; have what their groups need."""
_POLL_S = 0.01
_ID = bytes(128)  # of ncclUniqueId
_RANKS_PER_ROOT = 128  # of torch, for one NCCL id
_GLOO_ADDRESS = bytes(154)  # what a lazily connected rank publishes (recorded, torch 2.13)


def megatron_groups(mesh: Mesh) -> list[list[int]]:
    """Every group that Megatron-LM's `initialize_model_parallel` makes, in its order."""
    stages, replicas = mesh.pipeline, mesh.data
    model = [
        [
            mesh.global_rank(tp_rank=tp, dp_rank=dp, pp_rank=pp)
            for pp in range(stages)
            for tp in range(mesh.tensor)
        ]
        for dp in range(replicas)
    ]
    groups = [*mesh.groups("data"), *model, *mesh.groups("tensor")]
    for ranks in mesh.groups("pipeline"):
        ends = [ranks[0], ranks[-1]] if stages > 1 else ranks
        groups += [ranks, ends, [ranks[0]]]  # pipeline, embeddings, position embeddings
    return groups


def own_channels(mesh: Mesh, rank: int) -> list[tuple[str, list[int]]]:
    """The pairs of ranks, by a name, that this one has pipeline channels in: to either neighbour of
    the ring of stages, one for activations and one for gradients (`parallel/transfers.py`)."""
    if mesh.pipeline == 1:
        return []
    place = mesh.coordinates(rank)
    channels = []
    for first in sorted({(place.pp_rank - 1) % mesh.pipeline, place.pp_rank}, key=lambda s: s % 2):
        stages = (first, (first + 1) % mesh.pipeline)
        pair = sorted(
            mesh.global_rank(tp_rank=place.tp_rank, dp_rank=place.dp_rank, pp_rank=stage)
            for stage in stages
        )
        channels += [(f"{first} activation", pair), (f"{first} gradient", pair)]
    return channels


def own_groups_of(mesh: Mesh, rank: int) -> list[tuple[str, list[int]]]:
    """The groups of `parallel/groups.py` that `rank` is in, with tied embeddings."""
    place = mesh.coordinates(rank)
    line = [
        mesh.global_rank(tp_rank=place.tp_rank, dp_rank=place.dp_rank, pp_rank=pp)
        for pp in range(mesh.pipeline)
    ]
    first_of_row = rank - place.tp_rank
    groups = [
        ("tensor", list(range(first_of_row, first_of_row + mesh.tensor))),
        (
            "data",
            [
                mesh.global_rank(tp_rank=place.tp_rank, dp_rank=dp, pp_rank=place.pp_rank)
                for dp in range(mesh.data)
            ],
        ),
        ("pipeline", line),
    ]
    if mesh.pipeline > 1 and rank in (line[0], line[-1]):
        groups.append(("embedding", [line[0], line[-1]]))
    return [(name, ranks) for name, ranks in groups if len(ranks) > 1]


@dataclass(frozen=True)
class EveryGroup:
    """The paper's start. `num_groups`: of the first so many; None: of all.

    What a rank would work out by itself, beside all others, is worked out here before the clock
    starts: one machine plays all ranks.
    """

    mesh: Mesh
    barrier: Barrier
    num_groups: int | None = None

    @cached_property
    def groups(self) -> list[Sequence[int]]:
        return [range(self.mesh.world_size), *megatron_groups(self.mesh)[: self.num_groups]]

    @cached_property
    def _of_rank(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {rank: [] for rank in range(self.mesh.world_size)}
        for number, ranks in enumerate(self.groups):
            for rank in ranks:
                found[rank].append(number)
        return found

    def steps(self, calls: Calls, rank: int) -> Steps:
        return self._steps(calls, rank, self.groups, self._of_rank[rank])

    def _steps(
        self, calls: Calls, rank: int, groups: Sequence[Sequence[int]], own: Sequence[int]
    ) -> Steps:
        world_size = self.mesh.world_size
        yield from calls.join(rank, world_size)
        yield Mark(JOINED)
        for number in range(len(groups)):
            key = f"default_pg/0//store_based_barrier_key:{number}"
            yield from _barrier(calls, key, world_size, self.barrier)
        yield Mark(GROUPS)
        for number in own:
            prefix = f"default_pg/0//{number}//cuda//"
            yield from _communicator(calls, prefix, groups[number], rank)
        yield Mark(DONE)


@dataclass(frozen=True)
class OwnGroups:
    """Ordered creation, as in `megascale train`: the groups of the mesh, the pipeline's channels,
    and the two groups of all ranks on the CPU that checkpoints use."""

    mesh: Mesh

    def steps(self, calls: Calls, rank: int) -> Steps:
        named = [("world", list(range(self.mesh.world_size)))]
        named += own_groups_of(self.mesh, rank) + own_channels(self.mesh, rank)
        prefixes = [(f"world/0//{_hashed(name, ranks)}//cuda//", ranks) for name, ranks in named]
        return self._steps(calls, rank, prefixes)

    def _steps(self, calls: Calls, rank: int, groups: Sequence[tuple[str, list[int]]]) -> Steps:
        world_size = self.mesh.world_size
        yield from calls.join(rank, world_size)
        yield Mark(JOINED)
        for prefix, ranks in groups:
            yield from _communicator(calls, prefix, ranks, rank)
        for number in range(2):
            yield from _lazy_gloo(calls, f"world/0//control{number}//cpu//0", rank, world_size)
        yield Mark(DONE)


def _hashed(name: str, ranks: Sequence[int]) -> str:
    """As long as torch's hash of a group's ranks, and as unique."""
    return f"{name} {ranks[0]} {ranks[-1]} ".ljust(40, "0")


def _barrier(calls: Calls, key: str, world_size: int, form: Barrier) -> Steps:
    yield from calls.add(key, 1)
    arrived = yield from calls.add(key, 0)
    if form == "poll":
        while arrived != world_size:
            yield Pause(_POLL_S)
            arrived = yield from calls.add(key, 0)
        return
    last = f"{key}:last_worker"
    if arrived == world_size:
        yield from calls.set(last, b"1")
    yield from calls.wait(last)


def _communicator(calls: Calls, prefix: str, ranks: Sequence[int], rank: int) -> Steps:
    """NCCL's, when its group is first used."""
    roots = ranks[::_RANKS_PER_ROOT]
    if len(roots) == 1:
        key = f"{prefix}0"
        yield from calls.set(key, _ID) if rank == roots[0] else calls.get(key)
        return
    keys = tuple(f"{prefix}UniqueNCCLID:{number}" for number in range(len(roots)))
    if rank in roots:
        yield from calls.set(keys[roots.index(rank)], _ID)
    yield from calls.multi_get(keys)


def _lazy_gloo(calls: Calls, prefix: str, rank: int, world_size: int) -> Steps:
    """Everybody publishes an address, and looks up those of its neighbours in a ring."""
    yield from calls.set(f"{prefix}/{rank}", _GLOO_ADDRESS)
    for peer in {(rank - 1) % world_size, (rank + 1) % world_size} - {rank}:
        yield from calls.wait(f"{prefix}/{peer}")
        yield from calls.get(f"{prefix}/{peer}")
