"""Who computes which tile when, and what it waits for: all-gather + GEMM (Flux 4.2).

Contract. A rank's copy engine pushes its shard into slab `rank` of every peer's slot
[world_size, rows_per_rank, K], a chunk at a time, each chunk followed by its flag. The persistent
grid starts with the own shard and goes on with rank + 1, rank + 2, ...; a peer is therefore sent to
in the order rank - 1, rank - 2, ..., so that everyone receives next what everyone needs next.

- Slab `s` of the slot: written by the copy engine of rank `s`, read by the tiles whose rows touch
  shard `s`, written again by the next use of the slot.
- Flag `s * num_chunks + chunk`: set by the copy engine of rank `s` after the data, waited for by
  the same tiles, reset once per call by who finishes last, after it waited for all flags of peers.

A flag is set for every chunk of every peer in every call, also for one without rows: waiting for
all of them makes the call an all-to-all dependency, on which the reuse of slots rests.

**Two grids.** Where block_m divides rows_per_rank each shard has a tile grid of its own: a tile
reads one shard, and the own shard is read from x itself. Else ("straddling") one grid covers all
rows, the own shard is copied into the slot before the launch, and a tile waits for every chunk that
its rows touch. A grid for each shard would then waste up to block_m - 1 rows of work a shard.

**No deadlock**: tiles wait for copy engines only, never for another tile, so that any number of
programs in any order ends.

Rows of the gathered slot are global rows: those of rank r begin at r * rows_per_rank, and only the
end of the buffer is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megascale.flux.tiles import Tile, ceil_div, grouped, rows_per_rank, shard_rows


class Send(NamedTuple):
    """One push of the copy engine: global rows [first_row, end_row) of x, then `flag` at `peer`."""

    peer: int
    chunk: int
    first_row: int
    end_row: int
    flag: int


@dataclass(frozen=True)
class GatherTiles:
    """The protocol of one call on one rank. Equal on all ranks except for `rank`.

    `tiles_n` counts the column tiles of all weights that share the gather, side by side; `chunks`
    is how many pieces a shard is sent in at most (`num_chunks` is what comes of it).
    """

    num_rows: int
    world_size: int
    rank: int
    block_m: int
    tiles_n: int
    group_m: int = 8
    chunks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, self
        assert min(self.num_rows, self.block_m, self.tiles_n, self.group_m, self.chunks) >= 1, self

    @property
    def rows_per_rank(self) -> int:
        return rows_per_rank(self.num_rows, self.world_size)

    @property
    def straddling(self) -> bool:
        """One tile grid over all rows. One rank alone has nothing to straddle."""
        return self.world_size > 1 and self.rows_per_rank % self.block_m != 0

    @property
    def tiles_m(self) -> int:
        """Tile rows of one grid: of a shard, or where straddling of all rows."""
        rows = self.num_rows if self.straddling else self.rows_per_rank
        return ceil_div(rows, self.block_m)

    @property
    def tiles_per_grid(self) -> int:
        return self.tiles_m * self.tiles_n

    @property
    def num_tiles(self) -> int:
        """Indices of `tile_at`; some may have no rows, where the last shards are short."""
        return self.tiles_per_grid * (1 if self.straddling else self.world_size)

    @property
    def start_m(self) -> int:
        """Straddling: the tile row that comes first, the first one which begins in the own shard.

        The tile row that begins in the shard before also needs that shard, which arrives last.
        """
        return ceil_div(self.rank * self.rows_per_rank, self.block_m) % self.tiles_m

    def tile_at(self, index: int) -> Tile:
        """The tile that is computed `index`-th. Straddling: shard 0 and a tile row of all rows."""
        assert 0 <= index < self.num_tiles, (index, self)
        tile_m, tile_n = grouped(
            index % self.tiles_per_grid, self.tiles_m, self.tiles_n, self.group_m
        )
        if self.straddling:
            return Tile(0, (self.start_m + tile_m) % self.tiles_m, tile_n)
        return Tile((self.rank + index // self.tiles_per_grid) % self.world_size, tile_m, tile_n)

    def rows_of(self, tile: Tile) -> range:
        """Global rows that the tile writes: clipped at the end of its shard, and of all rows."""
        first = tile.shard * self.rows_per_rank + tile.tile_m * self.block_m
        end = self.num_rows if self.straddling else (tile.shard + 1) * self.rows_per_rank
        return range(first, min(first + self.block_m, end, self.num_rows))

    @property
    def rows_per_chunk(self) -> int:
        """Rows of a communication tile: whole tile rows where tiles do not straddle shards, so that
        a tile waits for one chunk."""
        if self.straddling:
            return ceil_div(self.rows_per_rank, self.chunks)
        return ceil_div(self.tiles_m, self.chunks) * self.block_m

    @property
    def num_chunks(self) -> int:
        """Chunks of a full shard, none of them empty."""
        return ceil_div(self.rows_per_rank, self.rows_per_chunk)

    @property
    def num_flags(self) -> int:
        return self.world_size * self.num_chunks

    def flag_of_row(self, row: int) -> int:
        """The flag that says that global row `row` has arrived. Grows with the row."""
        shard, inside = divmod(row, self.rows_per_rank)
        return shard * self.num_chunks + inside // self.rows_per_chunk

    def flags_of(self, tile: Tile) -> range:
        """Flags from the first to the last row of the tile. Those of the own shard are never set
        and not waited for: skip [own_flags.start, own_flags.stop)."""
        rows = self.rows_of(tile)
        if not rows:
            return range(0)
        return range(self.flag_of_row(rows[0]), self.flag_of_row(rows[-1]) + 1)

    @property
    def own_flags(self) -> range:
        return range(self.rank * self.num_chunks, (self.rank + 1) * self.num_chunks)

    def waits_of(self, tile: Tile) -> list[int]:
        """What a kernel waits for before it loads the tile's rows."""
        return [flag for flag in self.flags_of(tile) if flag not in self.own_flags]

    @property
    def peer_flags(self) -> list[int]:
        """All flags of a call here. The last program waits for each and resets it."""
        return [flag for flag in range(self.num_flags) if flag not in self.own_flags]

    def chunk_rows(self, shard: int, chunk: int) -> tuple[int, int]:
        """First and end global row of a chunk; no rows where the shard is short."""
        first, end = shard_rows(self.num_rows, self.world_size, shard)
        start = shard * self.rows_per_rank + chunk * self.rows_per_chunk
        return min(max(start, first), end), min(start + self.rows_per_chunk, end)

    def sends(self) -> list[Send]:
        """What this rank's copy engine does, in order. A chunk without rows is a flag alone."""
        return [
            Send(
                (self.rank - step) % self.world_size,
                chunk,
                *self.chunk_rows(self.rank, chunk),
                self.rank * self.num_chunks + chunk,
            )
            for step in range(1, self.world_size)
            for chunk in range(self.num_chunks)
        ]

    def slot_bytes(self, row_bytes: int) -> int:
        """Bytes of the slot: [world_size, rows_per_rank] rows of x."""
        return self.world_size * self.rows_per_rank * row_bytes
