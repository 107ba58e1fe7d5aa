"""Rows of a rank and the order of tiles: the arithmetic that the fused operators share (Flux 4.1).

Pure integers, so that the tests run it exhaustively for any world on a CPU. Every function is a
closed form: a kernel repeats it with integer divisions and holds no table.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """One output tile. Its first global row is `shard * rows_per_rank + tile_m * block_m`."""

    shard: int
    tile_m: int
    tile_n: int


def ceil_div(length: int, block: int) -> int:
    """Blocks that cover `length`."""
    return -(-length // block)


def rows_per_rank(num_rows: int, world_size: int) -> int:
    """Rows of a full shard: ceil(num_rows / world_size). Zero only where there are no rows."""
    return ceil_div(num_rows, world_size)


def shard_rows(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """First and end row of `rank`. The last ranks may own fewer rows than the others, or none."""
    full = rows_per_rank(num_rows, world_size)
    return min(rank * full, num_rows), min((rank + 1) * full, num_rows)


def grouped(index: int, tiles_m: int, tiles_n: int, group_m: int) -> tuple[int, int]:
    """Tile row and column at `index` of a grid of tiles_m * tiles_n.

    Groups of `group_m` tile rows, column by column inside a group: the programs that run at one
    time then read few rows of x and few columns of the weight, which stay in the L2 cache.
    """
    tiles_in_group = group_m * tiles_n
    first_m = index // tiles_in_group * group_m
    rows = min(tiles_m - first_m, group_m)  # the last group may be lower
    inside = index % tiles_in_group
    return first_m + inside % rows, inside // rows
