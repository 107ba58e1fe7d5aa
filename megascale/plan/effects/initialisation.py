"""How long process groups take to create, from counted calls to the store (MegaScale 3.5).

A store serves its calls one by one, so that a creation takes calls x seconds a call, whatever the
number of ranks that ask. What differs between the paper's three forms is the number of calls and
the store, and both are counted here rather than fitted:

- `world_barriers`, of every group in turn, over all ranks: a rank adds itself, reads the count and
  waits for the last one (three calls, as torch's `_store_based_barrier`); the last says so. G
  groups on n ranks: G (3 n + 1) calls, and G grows with n: O(n^2).
- `ordered`: a rank creates its own groups only, in one order over all ranks. A group of m exchanges
  an id (one sets, m - 1 get) and meets in a barrier of its own, 3 m + 1 calls; at the end all
  ranks meet once: O(n).

Fitted: two constants, the seconds of a call of torch's TCPStore of 2023 and of Redis, on the
paper's 1047 s and 361 s of 2,048 GPUs. Its third and fourth figure, under 5 s there and under 30 s
beyond 10,000, are predicted from them. What a group's members do among themselves is not in the
paper; `low` is without their barrier, `high` with it. Nothing is random here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale.errors import ConfigError
from megascale.plan.effects.interval import check_number
from megascale.topology import Mesh

Form = Literal["world_barriers", "ordered"]
Kind = Literal["tensor", "data", "pipeline", "model", "embedding"]

# Groups of Megatron-LM that the paper's figures are read by: with `model` (all ranks of a replica)
# 608 groups at 2,048 GPUs with tensor 8 and pipeline 8.
PAPER_KINDS: tuple[Kind, ...] = ("tensor", "data", "pipeline", "model")

_BARRIER_CALLS = 3  # of a rank: add itself, read the count, wait for the last
PAPER_MESH = Mesh(tensor=8, data=32, pipeline=8)
PAPER_TCP_S = 1047.0
PAPER_REDIS_S = 361.0


@dataclass(frozen=True)
class StoreCalls:
    """What a creation asks of the store.

    arrivals  of ranks at barriers over the whole world: what grows with the square
    calls     in all; `least` without the barriers inside groups
    """

    num_groups: int
    arrivals: int
    calls: int
    least: int


@dataclass(frozen=True)
class CreationTime:
    """Seconds until the last rank has its last group, and the range of what is not known."""

    value: float
    low: float
    high: float
    calls: StoreCalls


def groups_of(mesh: Mesh, kinds: tuple[Kind, ...] = PAPER_KINDS) -> dict[Kind, tuple[int, int]]:
    """(number of groups, members of one) by kind; groups of a single rank are not created."""
    sizes: dict[Kind, int] = {
        "tensor": mesh.tensor,
        "data": mesh.data,
        "pipeline": mesh.pipeline,
        "model": mesh.tensor * mesh.pipeline,
    }
    found: dict[Kind, tuple[int, int]] = {}
    for kind in kinds:
        if kind == "embedding":
            size, number = min(2, mesh.pipeline), mesh.tensor * mesh.data
        elif kind in sizes:
            size = sizes[kind]
            number = mesh.world_size // size
        else:
            legal = ", ".join((*sizes, "embedding"))
            raise ConfigError(f"groups of kind {kind!r}; legal: {legal}")
        if size > 1:
            found[kind] = (number, size)
    return found


def store_calls(mesh: Mesh, form: Form, kinds: tuple[Kind, ...] = PAPER_KINDS) -> StoreCalls:
    """Count the calls of a creation, exactly."""
    groups = groups_of(mesh, kinds).values()
    world = mesh.world_size
    num_groups = sum(number for number, _ in groups)
    memberships = sum(number * size for number, size in groups)
    if form == "world_barriers":
        calls = num_groups * (_BARRIER_CALLS * world + 1) + memberships
        return StoreCalls(num_groups, num_groups * world, calls, calls)
    if form != "ordered":
        raise ConfigError(f"form {form!r} of creating groups; legal: world_barriers, ordered")
    at_the_end = _BARRIER_CALLS * world + 1
    least = memberships + at_the_end
    calls = least + _BARRIER_CALLS * memberships + num_groups
    return StoreCalls(num_groups, world, calls, least)


def call_s(seconds: float, calls: StoreCalls) -> float:
    """Seconds of a call, fitted on one measured creation."""
    check_number("seconds of a creation", seconds, least=0.0, above=True)
    return seconds / calls.calls


def fitted_on_the_paper() -> dict[str, float]:
    """Seconds of a call by store, fitted on 1047 s and 361 s at 2,048 GPUs."""
    calls = store_calls(PAPER_MESH, "world_barriers")
    return {"tcp": call_s(PAPER_TCP_S, calls), "redis": call_s(PAPER_REDIS_S, calls)}


def creation_time(
    mesh: Mesh,
    form: Form,
    seconds_a_call: float,
    kinds: tuple[Kind, ...] = PAPER_KINDS,
) -> CreationTime:
    """Seconds to create all groups of `mesh` on a store that takes `seconds_a_call`."""
    check_number("seconds_a_call", seconds_a_call, least=0.0, above=True)
    calls = store_calls(mesh, form, kinds)
    high = calls.calls * seconds_a_call
    return CreationTime(high, calls.least * seconds_a_call, high, calls)
