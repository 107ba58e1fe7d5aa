"""Who computes which tile when, where it goes and who adds it: GEMM + reduce-scatter (Flux 4.1).

Contract. Every rank computes all rows of its partial product, a shard of rows (a destination) after
the other: rank + 1, rank + 2, ..., and its own shard last. A tile of another destination is stored
into slab `rank` of the owner's slot [world_size, rows_per_rank, N] and its flag is set there. A
tile of the own shard is not stored: its epilogue waits for the flags of the same tile of every
peer, adds the slabs in rank order to its own accumulator in fp32, and writes the result.

- Slab `s` of the slot: written by rank `s` tile by tile, read by the owner's program of the same
  tile, written again by the next use of the slot.
- Flag `s * tiles_per_shard + position`: set by rank `s` after its stores are complete, waited for
  and then reset by the owner's program of the same tile.

The destinations rotate by rank, so that no two ranks write to one owner at a time.

A tile grid covers one destination, and the last tile row is clipped there when it is stored. A tile
without rows (short last shards) computes nothing, but its flag is set and waited for like any
other: that makes the call an all-to-all dependency, on which the reuse of slots rests.

Staged, tiles of another destination first go to memory of this rank, and copy engines carry them
in `chunks`: whole groups of tile rows, which are neighbours both in the order of tiles and in
memory. A chunk travels when a counter says that all of its tiles are there; then the flags of all
of them are set. Their reader sees no difference.

**No deadlock**: only tiles of the own shard wait, and only for tiles of other destinations, which
every program of every rank computes before its first own tile. Any number of programs ends, if all
of a grid are resident at one time: one that starts late holds back tiles that others wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megascale.flux.tiles import Tile, ceil_div, grouped, rows_per_rank, shard_rows


class Chunk(NamedTuple):
    """Tiles of one destination that travel together. `first_row` .. `end_row`: global rows.

    slab        which of the world_size - 1 slabs [rows_per_rank, N] of staging memory
    counter     which counter the tiles count on, up to num_tiles
    first_flag  of num_tiles flags at the owner
    """

    owner: int
    slab: int
    first_row: int
    end_row: int
    counter: int
    num_tiles: int
    first_flag: int


@dataclass(frozen=True)
class ScatterTiles:
    """The protocol of one call on one rank. Equal on all ranks except for `rank`."""

    num_rows: int
    world_size: int
    rank: int
    block_m: int
    tiles_n: int
    group_m: int = 8

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, self
        assert min(self.num_rows, self.block_m, self.tiles_n, self.group_m) >= 1, self

    @property
    def rows_per_rank(self) -> int:
        return rows_per_rank(self.num_rows, self.world_size)

    @property
    def tiles_m(self) -> int:
        """Tile rows of one destination."""
        return ceil_div(self.rows_per_rank, self.block_m)

    @property
    def tiles_per_shard(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def num_tiles(self) -> int:
        """Indices of `tile_at`; some may have no rows, where the last shards are short."""
        return self.world_size * self.tiles_per_shard

    @property
    def num_flags(self) -> int:
        return self.num_tiles

    def tile_at(self, index: int) -> Tile:
        """The tile that is computed `index`-th; `shard` is its destination."""
        assert 0 <= index < self.num_tiles, (index, self)
        step, position = divmod(index, self.tiles_per_shard)
        tile_m, tile_n = grouped(position, self.tiles_m, self.tiles_n, self.group_m)
        return Tile((self.rank + 1 + step) % self.world_size, tile_m, tile_n)

    def rows_of(self, tile: Tile) -> range:
        """Global rows that the tile writes: clipped at the end of its destination."""
        _, end = shard_rows(self.num_rows, self.world_size, tile.shard)
        first = tile.shard * self.rows_per_rank + tile.tile_m * self.block_m
        return range(first, min(first + self.block_m, end))

    def slab_row(self, source: int, tile: Tile) -> int:
        """The tile's first row in the owner's slot, as [world_size * rows_per_rank] rows of N."""
        return source * self.rows_per_rank + tile.tile_m * self.block_m

    def flag_of(self, source: int, index: int) -> int:
        """Flag of the tile at `index` of any rank's order, at the tile's owner, set by `source`.

        The position inside the destination is the same on every rank.
        """
        return source * self.tiles_per_shard + index % self.tiles_per_shard

    def is_own(self, index: int) -> bool:
        """The tile is this rank's: it waits and adds. Else it is stored at its owner."""
        return index >= (self.world_size - 1) * self.tiles_per_shard

    def waits_of(self, index: int) -> list[int]:
        """Flags that the tile at `index` waits for, in the order of the sum; it resets them."""
        if not self.is_own(index):
            return []
        return [self.flag_of(peer, index) for peer in range(self.world_size) if peer != self.rank]

    def tiles_a_chunk(self, count: int) -> int:
        """Where a destination is cut into at most `count` chunks of whole groups."""
        groups = ceil_div(self.tiles_m, self.group_m)
        return ceil_div(groups, count) * self.group_m * self.tiles_n

    def chunks(self, count: int) -> list[Chunk]:
        """Chunks in the order in which their tiles are made. Some may have no rows."""
        size = self.tiles_a_chunk(count)
        rows_a_chunk = size // self.tiles_n * self.block_m
        found: list[Chunk] = []
        for step in range(1, self.world_size):
            owner = (self.rank + step) % self.world_size
            start, end = shard_rows(self.num_rows, self.world_size, owner)
            for index, first in enumerate(range(0, self.tiles_per_shard, size)):
                row = start + index * rows_a_chunk
                found.append(
                    Chunk(
                        owner,
                        step - 1,
                        min(row, end),
                        min(row + rows_a_chunk, end),
                        len(found),
                        min(size, self.tiles_per_shard - first),
                        self.rank * self.tiles_per_shard + first,
                    )
                )
        return found

    def slot_bytes(self, row_bytes: int) -> int:
        """Bytes of the slot: [world_size, rows_per_rank] rows of the output. The own slab is not
        used; leaving it out would save 1 / world_size and cost a case in every address."""
        return self.world_size * self.rows_per_rank * row_bytes
