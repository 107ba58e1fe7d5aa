"""Staged tiles in any order of streams: every tile is added once it has come, and not before."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.gemm_reduce_scatter.staging import MAX_CHUNKS, Staging, counters_of, staging_of
from megascale.flux.tiles import shard_rows
from tests.flux.simulated_streams import Device, SimulatedArena, arenas

COLUMNS, BLOCK_N = 6, 3


@dataclass(frozen=True)
class _Config:
    chunks: int
    block_m: int = 4
    block_n: int = BLOCK_N
    group_m: int = 1


def _all_set(flags: list[Tensor]) -> bool:
    return all(bool(flag) for flag in flags)


class _Kernel:
    """What the fused kernel does with the tiles of a rank's product, as operations of its stream.

    In the order of one program: tiles of others wait for nothing.
    """

    def __init__(self, tiles: ScatterTiles, product: Tensor, out: Tensor) -> None:
        self.tiles, self.product, self.out = tiles, product, out

    def launch(self, arena: SimulatedArena, slot: Any, staging: Staging, room: Tensor) -> None:
        for index in range(self.tiles.num_tiles):
            if not self.tiles.is_own(index):
                arena.compute.queue(partial(self._store, index, staging, room))
                continue
            flags = [slot.flags[arena.rank][f : f + 1] for f in self.tiles.waits_of(index)]
            arena.compute.queue(partial(self._add, index, slot, flags), partial(_all_set, flags))

    def _part(self, index: int) -> tuple[slice, slice]:
        tile = self.tiles.tile_at(index)
        rows = self.tiles.rows_of(tile)
        return slice(rows.start, rows.stop), slice(
            tile.tile_n * BLOCK_N, (tile.tile_n + 1) * BLOCK_N
        )

    def _store(self, index: int, staging: Staging, room: Tensor) -> None:
        rows, columns = self._part(index)
        hop, position = divmod(index, self.tiles.tiles_per_shard)
        c, owner = self.tiles.rows_per_rank, self.tiles.tile_at(index).shard
        start = shard_rows(self.tiles.num_rows, self.tiles.world_size, owner)[0]
        slabs = room.view(-1)[: (self.tiles.world_size - 1) * c * COLUMNS].view(-1, c, COLUMNS)
        if rows.stop > rows.start:
            slabs[hop][rows.start - start : rows.stop - start, columns] = self.product[
                rows, columns
            ]
        a_hop = -(-self.tiles.tiles_per_shard // staging.tiles_a_chunk)
        staging.counters[hop * a_hop + position // staging.tiles_a_chunk] += 1

    def _add(self, index: int, slot: Any, flags: list[Tensor]) -> None:
        rows, columns = self._part(index)
        tiles, first = (
            self.tiles,
            shard_rows(self.tiles.num_rows, self.tiles.world_size, self.tiles.rank)[0],
        )
        slabs = slot.view(
            tiles.rank, (tiles.world_size, tiles.rows_per_rank, COLUMNS), torch.float32
        )
        inside = slice(rows.start - first, rows.stop - first)
        total = self.product[rows, columns].clone()
        for source in range(tiles.world_size):
            if source != tiles.rank and rows.stop > rows.start:
                total += slabs[source][inside, columns]
        if rows.stop > rows.start:
            self.out[inside, columns] = total
        for flag in flags:
            flag.zero_()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("num_rows", "chunks"), [(1, 1), (24, 2), (25, 3), (33, 9)])
def test_any_order(
    world_size: int, num_rows: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _Config(chunks)
    for seed in range(6):
        device = Device(monkeypatch)
        c = -(-num_rows // world_size)
        ranks = arenas(world_size, world_size * c * COLUMNS * 4, device)
        generator = torch.Generator().manual_seed(seed)
        results = []
        for _ in range(5):  # every slot, and one again
            products = [
                torch.randint(-9, 9, (num_rows, COLUMNS), generator=generator).float()
                for _ in ranks
            ]
            for arena, product in zip(ranks, products, strict=True):
                results.append(_call(arena, device, product, config, sum(products)))
        device.run(seed)
        for out, wanted in results:
            assert torch.equal(out, wanted), (world_size, num_rows, chunks, seed)
        assert not any(bool(flags.any()) for flags in device.flags)


def _call(
    arena: SimulatedArena, device: Device, product: Tensor, config: _Config, total: Any
) -> tuple[Tensor, Tensor]:
    """(this rank's rows, what must be in them)"""
    num_rows, world_size = product.shape[0], arena.world_size
    first, end = shard_rows(num_rows, world_size, arena.rank)
    out = torch.full((end - first, COLUMNS), float("nan"))
    tiles = ScatterTiles(num_rows, world_size, arena.rank, 4, COLUMNS // BLOCK_N, 1)
    with device.stream(arena.compute), arena.turn(0) as slot:
        counters = counters_of(arena)
        if not any(words is counters for words in device.flags):
            device.flags.append(counters)
        staging = staging_of(slot, arena, num_rows, COLUMNS, torch.float32, config)
        assert staging is not None
        room = staging.room(product)
        room.view(-1).fill_(float("nan"))
        device.memory.append(room)
        arena.fork()
        _Kernel(tiles, product, out).launch(arena, slot, staging, room)
        staging.carry(room, arena)
    return out, total[first:end]


def test_more_chunks_than_counters_are_not_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    arena = arenas(2, 4096, device)[0]
    config = _Config(MAX_CHUNKS + 1)
    assert staging_of(arena._slots[0], arena, 8, 6, torch.float32, config) is None
