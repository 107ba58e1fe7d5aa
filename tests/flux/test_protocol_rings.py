"""Rings deliver every shard to every rank once, and their reverse sums every part once."""

from __future__ import annotations

from collections import Counter

import pytest

from megascale.flux.all_gather_gemm.protocol import GatherTiles
from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.rings import (
    Hop,
    arrival_order,
    gather_ring,
    gather_two_halves,
    reduce_scatter_of,
)

CASES = [
    *((gather_ring(w, d), w) for w in (1, 2, 3, 4, 5, 8, 72) for d in (-1, 1)),
    *((gather_two_halves(w, d), w) for w in (2, 4, 6, 8, 72) for d in (-1, 1)),
]


@pytest.mark.parametrize(("hops", "world_size"), CASES)
def test_a_gather_brings_every_shard_once(hops: list[Hop], world_size: int) -> None:
    since = {(rank, rank): -1 for rank in range(world_size)}  # (rank, shard): step it came in
    for hop in sorted(hops):
        assert since[hop.sender, hop.shard] < hop.step, hop
        assert (hop.receiver, hop.shard) not in since, hop
        since[hop.receiver, hop.shard] = hop.step
    assert len(since) == world_size**2
    assert set(Counter((h.step, h.sender) for h in hops).values()) <= {1}  # one send at a time
    assert set(Counter((h.step, h.receiver) for h in hops).values()) <= {1}
    assert len({hop.step for hop in hops}) == world_size - 1  # no step idles


@pytest.mark.parametrize(("hops", "world_size"), CASES)
def test_a_reduce_scatter_adds_every_part_once(hops: list[Hop], world_size: int) -> None:
    sums = {(r, s): Counter([r]) for r in range(world_size) for s in range(world_size)}
    for hop in reduce_scatter_of(hops):
        sums[hop.receiver, hop.shard] += sums.pop((hop.sender, hop.shard))
    assert sums == {(rank, rank): Counter(range(world_size)) for rank in range(world_size)}


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 72])
def test_rings_keep_the_order_of_the_kernels_tiles(world_size: int) -> None:
    gather, scatter = gather_ring(world_size), reduce_scatter_of(gather_ring(world_size, 1))
    for rank in range(world_size):
        gathered = GatherTiles(world_size, world_size, rank, 1, 1)
        assert arrival_order(gather, rank) == [gathered.tile_at(i).shard for i in range(world_size)]
        scattered = ScatterTiles(world_size, world_size, rank, 1, 1)
        order = [hop.shard for hop in scatter if hop.sender == rank]
        assert [*order, rank] == [scattered.tile_at(i).shard for i in range(world_size)]


@pytest.mark.parametrize("world_size", [4, 8, 72])
def test_two_halves_spare_the_link_between_them(world_size: int) -> None:
    half = world_size // 2

    def crossing(hops: list[Hop]) -> int:
        return sum(hop.sender // half < hop.receiver // half for hop in hops)

    assert crossing(gather_two_halves(world_size)) == half  # each shard of a half, once
    assert crossing(gather_ring(world_size)) == world_size - 1
    with pytest.raises(AssertionError, match="two halves of 5 ranks"):
        gather_two_halves(5)
