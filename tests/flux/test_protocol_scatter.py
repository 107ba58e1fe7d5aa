"""GEMM + reduce-scatter: every tile once, every flag set and awaited once, no wait in a circle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.tiles import shard_rows
from tests.flux.grids import Program, Step, stuck

WORLDS = [1, 2, 3, 4, 8]
ROWS = [1, 2, 7, 8, 9, 16, 24, 33]


def _cases(world_size: int) -> Iterator[list[ScatterTiles]]:
    for num_rows in ROWS:
        for block_m in (1, 3, 4, 16):
            for group_m, tiles_n in ((1, 1), (2, 3), (8, 2)):
                yield _ranks(num_rows, world_size, block_m, tiles_n, group_m)


def _ranks(
    num_rows: int, world_size: int, block_m: int, tiles_n: int, group_m: int = 8
) -> list[ScatterTiles]:
    return [
        ScatterTiles(num_rows, world_size, rank, block_m, tiles_n, group_m)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_element_is_computed_once_on_every_rank(world_size: int) -> None:
    for ranks in _cases(world_size):
        for tiles in ranks:
            order = [tiles.tile_at(index) for index in range(tiles.num_tiles)]
            assert len(set(order)) == len(order), tiles
            computed = [(row, tile.tile_n) for tile in order for row in tiles.rows_of(tile)]
            wanted = [(row, n) for row in range(tiles.num_rows) for n in range(tiles.tiles_n)]
            assert sorted(computed) == wanted, tiles
            for index, tile in enumerate(order):
                first, end = shard_rows(tiles.num_rows, world_size, tile.shard)
                assert set(tiles.rows_of(tile)) <= set(range(first, end)), (tiles, tile)
                assert tiles.is_own(index) == (tile.shard == tiles.rank)


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_flag_is_set_once_and_waited_for_once(world_size: int) -> None:
    for ranks in _cases(world_size):
        was_set: Counter[tuple[int, int]] = Counter()
        waited: Counter[tuple[int, int]] = Counter()
        for tiles in ranks:
            for index in range(tiles.num_tiles):
                if not tiles.is_own(index):
                    owner = tiles.tile_at(index).shard
                    was_set[owner, tiles.flag_of(tiles.rank, index)] += 1
                waited.update((tiles.rank, flag) for flag in tiles.waits_of(index))
        assert was_set == waited, ranks[0]
        assert set(was_set.values()) <= {1}, ranks[0]
        for tiles in ranks:
            own = {flag for owner, flag in waited if owner == tiles.rank}
            assert all(0 <= flag < tiles.num_flags for flag in own)
            # of every peer, also on a rank that owns no rows
            sources = {flag // tiles.tiles_per_shard for flag in own}
            assert sources == set(range(world_size)) - {tiles.rank}, tiles


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_flag_speaks_of_the_tile_that_its_reader_adds(world_size: int) -> None:
    for ranks in _cases(world_size):
        announced = {
            (tile.shard, source.flag_of(source.rank, index)): (source.rank, tile)
            for source in ranks
            for index in range(source.num_tiles)
            for tile in [source.tile_at(index)]
            if not source.is_own(index)
        }
        for tiles in ranks:
            for index in range(tiles.num_tiles):
                peers = [peer for peer in range(world_size) if peer != tiles.rank]
                for peer, flag in zip(peers, tiles.waits_of(index), strict=False):
                    wanted = (peer, tiles.tile_at(index))
                    assert announced[tiles.rank, flag] == wanted, (tiles, index)


@pytest.mark.parametrize("world_size", WORLDS)
def test_slabs_are_written_once_and_do_not_overlap(world_size: int) -> None:
    for ranks in _cases(world_size):
        for owner in ranks:
            written: Counter[tuple[int, int]] = Counter()
            for source in ranks:
                for index in range(source.num_tiles):
                    tile = source.tile_at(index)
                    if tile.shard != owner.rank or source.is_own(index):
                        continue
                    first = owner.slab_row(source.rank, tile)
                    rows = range(first, first + len(source.rows_of(tile)))
                    slab = range(
                        source.rank * owner.rows_per_rank, (source.rank + 1) * owner.rows_per_rank
                    )
                    assert not rows or (rows[0] in slab and rows[-1] in slab), (source, tile)
                    assert not rows or rows[-1] < owner.slot_bytes(1)
                    written.update((row, tile.tile_n) for row in rows)
            first, end = shard_rows(owner.num_rows, world_size, owner.rank)
            assert len(written) == (end - first) * owner.tiles_n * (world_size - 1), owner
            assert set(written.values()) <= {1}, owner


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 72])
def test_destinations_rotate_and_the_own_is_last(world_size: int) -> None:
    ranks = _ranks(world_size * 8, world_size, 4, 2)
    for index in range(ranks[0].num_tiles):
        owners = [tiles.tile_at(index).shard for tiles in ranks]
        assert sorted(owners) == list(range(world_size))  # never two into one
    for tiles in ranks:
        order = [tiles.tile_at(index).shard for index in range(tiles.num_tiles)]
        assert order == [
            (tiles.rank + step) % world_size for step in range(1, world_size + 1) for _ in range(4)
        ]


def _steps(tiles: ScatterTiles) -> list[Step]:
    return [
        Step([(tiles.rank, flag) for flag in tiles.waits_of(index)], [])
        if tiles.is_own(index)
        else Step([], [(tiles.tile_at(index).shard, tiles.flag_of(tiles.rank, index))])
        for index in range(tiles.num_tiles)
    ]


def _programs(steps: list[Step], grid: int) -> list[Program]:
    return [steps[program::grid] for program in range(grid)]


@pytest.mark.parametrize("world_size", WORLDS)
def test_grids_of_any_size_end(world_size: int) -> None:
    for num_rows, block_m in ((1, 4), (16, 2), (33, 4), (40, 8)):
        ranks = _ranks(num_rows, world_size, block_m, 2)
        for grid in range(1, ranks[0].num_tiles + 3):
            for seed in (None, 0, 1):
                programs = [_programs(_steps(tiles), grid) for tiles in ranks]
                assert not stuck(programs, seed=seed), (ranks[0], grid)


def test_grids_of_different_sizes_end() -> None:
    """A rank may leave more SMs to others than its peers do."""
    ranks = _ranks(33, 3, 2, 2)
    for grids in ((1, 2, 7), (5, 1, 3), (40, 2, 1)):
        programs = [_programs(_steps(tiles), g) for tiles, g in zip(ranks, grids, strict=True)]
        assert not stuck(programs, seed=3)


def test_own_tiles_first_would_be_a_deadlock() -> None:
    ranks = _ranks(16, 2, 2, 1)
    turned = [s[t.tiles_per_shard :] + s[: t.tiles_per_shard] for t in ranks for s in [_steps(t)]]
    assert stuck([_programs(steps, 1) for steps in turned])
    assert stuck([_programs(steps, 3) for steps in turned])


def test_a_grid_must_be_resident_unless_tiles_are_taken_from_a_counter() -> None:
    """What NCCL kernels beside a full grid do: some programs start only when others have ended.

    Taken from a counter, tiles start in their order whoever is there, and one program is enough.
    """
    ranks = _ranks(16, 2, 2, 1)
    for seed in (None, 0, 1):
        programs = [_programs(_steps(tiles), 3) for tiles in ranks]
        assert stuck(programs, resident=1, seed=seed)
        in_order = [[[step] for step in _steps(tiles)] for tiles in ranks]
        assert not stuck(in_order, resident=1, seed=seed)


@pytest.mark.parametrize("world_size", [1, 2, 8, 72])
def test_large_cases_stay_in_their_memory(world_size: int) -> None:
    for num_rows in (1, 63, 127, 1000, 4097, 8192, 32768):
        for block_m in (64, 128, 256):
            for rank in {0, world_size // 2, world_size - 1}:
                tiles = ScatterTiles(num_rows, world_size, rank, block_m, 3)
                assert tiles.slot_bytes(1) - num_rows < world_size
                rows = [len(tiles.rows_of(tiles.tile_at(i))) for i in range(tiles.num_tiles)]
                assert sum(rows) == num_rows * 3
                last = tiles.num_tiles - 1
                assert max(tiles.waits_of(last), default=0) < tiles.num_flags


@pytest.mark.parametrize("world_size", WORLDS)
def test_chunks_are_neighbouring_tiles_of_one_destination(world_size: int) -> None:
    for ranks in _cases(world_size):
        for tiles in ranks:
            for count in (1, 2, 3, 100):
                size, moves = tiles.tiles_a_chunk(count), tiles.chunks(count)
                assert [chunk.counter for chunk in moves] == list(range(len(moves)))
                assert len(moves) <= (world_size - 1) * count
                a_destination = -(-tiles.tiles_per_shard // size)
                seen: Counter[int] = Counter()
                for index in range(tiles.num_tiles):
                    if tiles.is_own(index):
                        continue
                    # as the kernel counts
                    hop, position = divmod(index, tiles.tiles_per_shard)
                    chunk = moves[hop * a_destination + position // size]
                    seen[chunk.counter] += 1
                    tile = tiles.tile_at(index)
                    assert (chunk.owner, chunk.slab) == (tile.shard, hop)
                    rows = tiles.rows_of(tile)
                    assert set(rows) <= set(range(chunk.first_row, chunk.end_row)), (tiles, chunk)
                    flag = tiles.flag_of(tiles.rank, index)
                    assert 0 <= flag - chunk.first_flag < chunk.num_tiles, (tiles, chunk)
                assert seen == {chunk.counter: chunk.num_tiles for chunk in moves}
                moved = [row for c in moves for row in range(c.first_row, c.end_row)]
                own = range(*shard_rows(tiles.num_rows, world_size, tiles.rank))
                assert sorted([*moved, *own]) == list(range(tiles.num_rows)), (tiles, count)
