"""Who stores, who adds, and who tells whom: the relay of a tile to its owner (see the package).

`hop` h of a rank are the tiles of destination rank + h; h = W is its own shard, the last. The tile
of owner d passes ranks d - 1, d - 2, ..., d + 1, d on their hops 1, 2, ..., W - 1, W:

  hop 1        store it in the owner's slot
  hops 2..W-1  wait that it is one's turn; add to what is there
  hop W        wait; take what is there, add it to the own partial: the result

and after each hop but the last a flag at rank - 1: its turn. Flag (h - 1) * tiles_per_shard +
position says that hop h of rank + 1 is done with the tile; the waiter, on its hop h + 1, resets it.

The slot is [rows_per_rank, N]. Tiles without rows (short last shards) are relayed like others.

**No deadlock**: a tile of hop h waits for one of hop h - 1 alone, and every program of every rank
does its tiles in the order of hops. So of all tiles that wait, one of the lowest hop waits for a
tile whose program waits for nothing. As ever, all programs of a grid must be resident.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.tiles import Tile


@dataclass(frozen=True)
class Relay:
    """The protocol of one call on one rank. `tiles`: which tile when, as of the fused form."""

    tiles: ScatterTiles

    @property
    def num_flags(self) -> int:
        """At every rank."""
        return (self.tiles.world_size - 1) * self.tiles.tiles_per_shard

    def hop(self, index: int) -> int:
        """Of the tile that is computed `index`-th; 1 .. world_size."""
        return 1 + index // self.tiles.tiles_per_shard

    def stores(self, index: int) -> bool:
        """The tile is the first to come: what its place holds is overwritten."""
        return self.hop(index) == 1 < self.tiles.world_size

    def wait_of(self, index: int) -> int | None:
        """The own flag that the tile at `index` waits for and resets; set by rank + 1."""
        return None if self.hop(index) == 1 else self._flag(self.hop(index) - 1, index)

    def told_by(self, index: int) -> tuple[int, int] | None:
        """(rank, its flag) that the tile sets when it is done; None for the own shard."""
        if self.tiles.is_own(index):
            return None
        left = (self.tiles.rank - 1) % self.tiles.world_size
        return left, self._flag(self.hop(index), index)

    def _flag(self, hop: int, index: int) -> int:
        return (hop - 1) * self.tiles.tiles_per_shard + index % self.tiles.tiles_per_shard

    def slot_row(self, tile: Tile) -> int:
        """The tile's first row in its owner's slot."""
        return tile.tile_m * self.tiles.block_m

    def slot_bytes(self, row_bytes: int) -> int:
        """[rows_per_rank] rows of the output."""
        return self.tiles.rows_per_rank * row_bytes
