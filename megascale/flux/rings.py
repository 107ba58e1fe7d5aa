"""Ring orders for machines without all-to-all NVLink, as data (Flux 4.3).

Where every pair of devices has a link of its own a shard goes straight to each peer (`sends` of the
operators' protocols). Over PCIe or a partial NVLink mesh those transfers share links; then shards
travel from neighbour to neighbour and each is stored and passed on:

- `gather_ring`: one ring through all ranks. Every link carries world_size - 1 shards.
- `gather_two_halves`: two halves (sockets) that a slow link joins. A shard crosses it once, to its
  owner's partner, and travels on inside the other half: world_size / 2 shards each way, where a
  ring through all ranks carries world_size - 1.

In both, every rank sends and receives world_size - 1 shards, and gets each exactly once. Reversed
in time and direction the same hops are a reduce-scatter: a sum goes where the shard came from.
"""

from __future__ import annotations

from typing import NamedTuple


class Hop(NamedTuple):
    """`sender` passes `shard` on to `receiver`. Hops of one step run at one time; in a gather the
    sender owns the shard or got it in an earlier step, in a reduce-scatter it has added to its own
    partial sum what earlier steps brought."""

    step: int
    sender: int
    receiver: int
    shard: int


def gather_ring(world_size: int, direction: int = -1) -> list[Hop]:
    """All-gather around one ring, rank to rank + direction (-1 or 1).

    With -1 shards arrive in the order rank + 1, rank + 2, ...: that of the fused kernel's tiles.
    """
    return [
        Hop(step, rank, (rank + direction) % world_size, (rank - direction * step) % world_size)
        for step in range(world_size - 1)
        for rank in range(world_size)
    ]


def gather_two_halves(world_size: int, direction: int = -1) -> list[Hop]:
    """All-gather in two halves of an even `world_size`: ranks [0, W/2) and [W/2, W).

    Shards cross in step 0 and meanwhile travel the own half's ring from step 1 on; those of the
    other half follow.
    """
    half, odd = divmod(world_size, 2)
    assert not odd, f"two halves of {world_size} ranks"
    hops = [Hop(0, rank, (rank + half) % world_size, rank) for rank in range(world_size)]
    for first in (0, half):  # where the half that travels begins
        for turn in range(half - 1):
            for rank in range(world_size):
                base = rank // half * half
                position = rank - base
                receiver = base + (position + direction) % half
                shard = (base + first) % world_size + (position - direction * turn) % half
                step = 1 + turn + (half - 1 if first else 0)
                hops.append(Hop(step, rank, receiver, shard))
    return sorted(hops)


def reduce_scatter_of(gather: list[Hop]) -> list[Hop]:
    """The reduce-scatter that undoes a gather: every hop backwards, the last first.

    Of a gather with direction 1 it visits destinations in the order of the fused kernel's tiles:
    rank + 1, rank + 2, ..., the own last.
    """
    last = max((hop.step for hop in gather), default=0)
    return sorted(
        Hop(last - step, receiver, sender, shard) for step, sender, receiver, shard in gather
    )


def arrival_order(gather: list[Hop], rank: int) -> list[int]:
    """Shards in the order in which `rank` has them, its own first: the order of its tiles."""
    return [rank, *(hop.shard for hop in sorted(gather) if hop.receiver == rank)]
