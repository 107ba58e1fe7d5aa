"""Shards cover all rows in order, and a grid's order names every tile once."""

from __future__ import annotations

import pytest

from megascale.flux.tiles import grouped, rows_per_rank, shard_rows


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 72])
def test_shards_are_all_rows_in_order(world_size: int) -> None:
    for num_rows in [*range(3 * world_size + 2), 1000, 4097, 32768]:
        full = rows_per_rank(num_rows, world_size)
        assert (full - 1) * world_size < num_rows <= full * world_size or full == num_rows == 0
        end = 0
        for rank in range(world_size):
            first, next_end = shard_rows(num_rows, world_size, rank)
            assert first == end
            assert first == min(rank * full, num_rows)  # what addresses are computed from
            assert next_end - first in (full, 0) or next_end == num_rows
            end = next_end
        assert end == num_rows


def test_a_grid_is_walked_in_groups_of_rows() -> None:
    for tiles_m in range(1, 10):
        for tiles_n in range(1, 6):
            for group_m in (1, 2, 3, 8, 16):
                tiles = [grouped(i, tiles_m, tiles_n, group_m) for i in range(tiles_m * tiles_n)]
                by_hand = [
                    (m, n)
                    for first in range(0, tiles_m, group_m)
                    for n in range(tiles_n)
                    for m in range(first, min(first + group_m, tiles_m))
                ]
                assert tiles == by_hand
