"""All-gather + GEMM: every tile once, no tile before its rows, every flag set and waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from megascale.flux.all_gather_gemm.protocol import GatherTiles
from megascale.flux.tiles import shard_rows
from tests.flux.grids import Program, Step, stuck

WORLDS = [1, 2, 3, 4, 8]
ROWS = [1, 2, 7, 8, 9, 16, 24, 33]


def _cases(world_size: int) -> Iterator[GatherTiles]:
    """Rank 0 of each case; `_ranks` gives the others."""
    for num_rows in ROWS:
        for block_m in (1, 3, 4, 16):
            for chunks, group_m, tiles_n in ((1, 1, 1), (2, 2, 3), (3, 8, 2)):
                yield GatherTiles(num_rows, world_size, 0, block_m, tiles_n, group_m, chunks)


def _ranks(case: GatherTiles) -> list[GatherTiles]:
    return [replace(case, rank=rank) for rank in range(case.world_size)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_element_is_written_once(world_size: int) -> None:
    for case in _cases(world_size):
        wanted = [(row, n) for row in range(case.num_rows) for n in range(case.tiles_n)]
        for tiles in _ranks(case):
            order = [tiles.tile_at(index) for index in range(tiles.num_tiles)]
            assert len(set(order)) == len(order), tiles
            written = [(row, tile.tile_n) for tile in order for row in tiles.rows_of(tile)]
            assert sorted(written) == wanted, tiles


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_tile_waits_for_exactly_the_chunks_of_its_rows(world_size: int) -> None:
    for case in _cases(world_size):
        for tiles in _ranks(case):
            for index in range(tiles.num_tiles):
                tile = tiles.tile_at(index)
                foreign = [
                    tiles.flag_of_row(row)
                    for row in tiles.rows_of(tile)
                    if row // tiles.rows_per_rank != tiles.rank
                ]
                assert tiles.waits_of(tile) == sorted(set(foreign)), (tiles, tile)
                if not tiles.straddling:  # one chunk, so one wait, and x is one shard's
                    assert len(tiles.waits_of(tile)) <= 1, (tiles, tile)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_foreign_row_and_every_flag_comes_once(world_size: int) -> None:
    for case in _cases(world_size):
        ranks = _ranks(case)
        rows: list[Counter[int]] = [Counter() for _ in ranks]
        flags: list[Counter[int]] = [Counter() for _ in ranks]
        for tiles in ranks:
            for send in tiles.sends():
                assert send.peer != tiles.rank
                rows[send.peer].update(range(send.first_row, send.end_row))
                flags[send.peer][send.flag] += 1
                own = shard_rows(tiles.num_rows, world_size, tiles.rank)
                assert own[0] <= send.first_row <= send.end_row <= own[1], (tiles, send)
                sent = range(send.first_row, send.end_row)
                assert {tiles.flag_of_row(row) for row in sent} <= {send.flag}, (tiles, send)
        for tiles in ranks:
            first, end = shard_rows(tiles.num_rows, world_size, tiles.rank)
            foreign = [row for row in range(tiles.num_rows) if not first <= row < end]
            assert rows[tiles.rank] == Counter(foreign), tiles
            # all of them, once each, are waited for by the last program, at least one of each peer
            assert flags[tiles.rank] == Counter(tiles.peer_flags), tiles
            sources = {flag // tiles.num_chunks for flag in tiles.peer_flags}
            assert sources == set(range(world_size)) - {tiles.rank}
            assert all(0 <= flag < tiles.num_flags for flag in tiles.peer_flags)
            for index in range(tiles.num_tiles):
                assert set(tiles.waits_of(tiles.tile_at(index))) <= set(tiles.peer_flags)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 72])
def test_shards_are_sent_in_the_order_of_their_use(world_size: int) -> None:
    ranks = _ranks(GatherTiles(world_size * 8, world_size, 0, 4, 2, 8, 2))
    for position, sends in enumerate(zip(*(tiles.sends() for tiles in ranks), strict=True)):
        assert sorted(send.peer for send in sends) == list(range(world_size))  # one into each
        for tiles, send in zip(ranks, sends, strict=True):
            assert (tiles.rank - send.peer) % world_size == 1 + position // 2
            assert send.chunk == position % 2
    for tiles in ranks:
        order = [tiles.tile_at(index).shard for index in range(tiles.num_tiles)]
        assert order == [
            (tiles.rank + step) % world_size for step in range(world_size) for _ in range(4)
        ]


def test_a_straddling_grid_begins_in_the_own_shard_and_ends_before_it() -> None:
    for world_size in WORLDS[1:]:
        for case in _cases(world_size):
            for tiles in _ranks(case) if case.straddling else []:
                order = [tiles.tile_at(i).tile_m for i in range(tiles.num_tiles)]
                own = tiles.rank * tiles.rows_per_rank
                if own + tiles.block_m <= tiles.num_rows:
                    assert own <= order[0] * tiles.block_m < own + tiles.block_m, tiles
                distinct = list(dict.fromkeys(order)) if tiles.group_m == 1 else []
                assert all((b - a) % tiles.tiles_m == 1 for a, b in pairwise(distinct)), tiles


def _programs(tiles: GatherTiles, grid: int) -> list[Program]:
    """The copy engine, the kernel's programs, and the wait of whoever finishes last."""
    copies = [Step([], [(send.peer, send.flag)]) for send in tiles.sends()]
    kernel = [
        [
            Step([(tiles.rank, f) for f in tiles.waits_of(tiles.tile_at(index))], [])
            for index in range(program, tiles.num_tiles, grid)
        ]
        for program in range(grid)
    ]
    return [copies, *kernel, [Step([(tiles.rank, flag) for flag in tiles.peer_flags], [])]]


@pytest.mark.parametrize("world_size", WORLDS)
def test_grids_of_any_size_end(world_size: int) -> None:
    for num_rows, block_m, chunks in ((1, 4, 1), (16, 2, 2), (33, 4, 3), (40, 8, 1)):
        ranks = _ranks(GatherTiles(num_rows, world_size, 0, block_m, 2, 2, chunks))
        for grid in (1, 2, 3, 5, ranks[0].num_tiles, ranks[0].num_tiles + 3):
            for seed in (None, 0, 1):
                assert not stuck([_programs(tiles, grid) for tiles in ranks], seed=seed)
            # also where a device runs them one after another, the copy engine beside them
            apart = [
                part for t in ranks for part in (_programs(t, grid)[:1], _programs(t, grid)[1:])
            ]
            assert not stuck(apart, resident=1)


def test_a_chunk_that_is_never_sent_is_noticed() -> None:
    ranks = _ranks(GatherTiles(16, 2, 0, 4, 1, 8, 2))
    programs = [_programs(tiles, 2) for tiles in ranks]
    del programs[1][0][-1]
    assert {grid for grid, _ in stuck(programs)} == {0}


@pytest.mark.parametrize("world_size", [1, 2, 8, 72])
def test_large_cases_stay_in_their_memory(world_size: int) -> None:
    for num_rows in (1, 63, 127, 1000, 4097, 8192, 32768):
        for block_m in (64, 128, 256):
            for rank in {0, world_size // 2, world_size - 1}:
                tiles = GatherTiles(num_rows, world_size, rank, block_m, 3, 8, 4)
                slot_rows = tiles.slot_bytes(1)
                assert slot_rows >= num_rows
                assert slot_rows - num_rows < world_size
                for index in {0, tiles.num_tiles // 2, tiles.num_tiles - 1}:
                    rows = tiles.rows_of(tiles.tile_at(index))
                    assert not rows or 0 <= rows[0] <= rows[-1] < num_rows
                assert sum(
                    len(tiles.rows_of(tiles.tile_at(i))) for i in range(tiles.num_tiles)
                ) == (num_rows * 3)
                assert tiles.num_flags <= world_size * 4
