"""Output tiles that copy engines carry to their owners, chunk by chunk (order: protocol.py).

The kernel stores them in memory of this rank, which costs it no more than a GEMM's own output, and
counts them; the copy stream waits for each count, copies, and sets the flags of the chunk's tiles.
Stored straight into the peer's memory they stand in the way of the GEMM's own loads: 40 us of a
GEMM of 381 at 4096 x 8192 x 4096, where this costs 5 (2x H200; docs/log.md).

What it costs: one more pass of the product through L2, memory for it (two ranks: none, the slot has
room), three calls of the driver a chunk, and a chunk's time over the link before its first tile can
be added: hence several chunks where a shard is large.

Nothing starves: copy engines need no SM, and what they wait for are tiles that themselves wait for
nothing. A stream that shares a hardware queue with the copy stream stands as long as they take.
A peer sees tiles and flags as if they had been stored by the kernel, so each rank stages or not as
it likes (`can_stage`).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.env import launches_block
from megascale.flux.arena import zeros_of
from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.lanes import remembered
from megascale.flux.tiles import ceil_div, shard_rows
from megascale.kernels.driver import driver

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot

MAX_CHUNKS = 1024  # of a call


class Staging:
    """Where the tiles of one problem wait and where they go, for one slot.

    counters       int32 [MAX_CHUNKS], zero between calls
    tiles_a_chunk  of one destination; the last chunk may have fewer
    """

    def __init__(
        self, slot: Slot, counters: Tensor, tiles: ScatterTiles, shape: tuple[int, int], count: int
    ) -> None:
        """`shape`: (columns, bytes of a row)"""
        columns, row_bytes = shape
        c = tiles.rows_per_rank
        self.counters = counters
        self.tiles_a_chunk = tiles.tiles_a_chunk(count)
        self._shape = (tiles.world_size - 1, c, columns)
        # The own slab of the own slot: nobody writes there, and one slab is what two ranks need.
        own = slot.data[tiles.rank][tiles.rank * c * row_bytes : (tiles.rank + 1) * c * row_bytes]
        self._own = own if tiles.world_size == 2 else None
        self._moves = []
        for chunk in tiles.chunks(count):
            inside = chunk.first_row - shard_rows(tiles.num_rows, tiles.world_size, chunk.owner)[0]
            self._moves.append(
                (
                    driver().taking([(counters.data_ptr() + 4 * chunk.counter, chunk.num_tiles)]),
                    slot.data[chunk.owner].data_ptr() + (tiles.rank * c + inside) * row_bytes,
                    (chunk.slab * c + inside) * row_bytes,
                    (chunk.end_row - chunk.first_row) * row_bytes,
                    slot.flags[chunk.owner].data_ptr() + 4 * chunk.first_flag,
                    chunk.num_tiles,
                )
            )

    def room(self, out: Tensor) -> Tensor:
        """Memory for the tiles of one call, in the dtype of `out`."""
        if self._own is not None:
            return self._own.view(out.dtype)
        return out.new_empty(self._shape)

    def carry(self, room: Tensor, arena: Arena) -> None:
        """Queue a call's copies on the copy stream, which has forked before the kernel's launch and
        joins here: a hardware queue may be shared, and what follows a wait in it stands too."""
        source = room.data_ptr()
        for made, to, offset, num_bytes, flags, count in self._moves:
            arena.carry(made, to, source + offset, num_bytes, flags, count)
        arena.join()


def can_stage(arena: Arena, stream: int) -> bool:
    """Not in a capture, which knows no waits of a stream. Not where the host would stand in the
    kernel's launch until it ends, before the copies that peers wait for are queued; and not where
    the kernel itself would stand before them, in the copy stream."""
    return not arena.capturing and stream != arena.copy_stream and not _launches_block()


_launches_block = cache(launches_block)


def staging_of(
    slot: Slot, arena: Arena, num_rows: int, columns: int, dtype: torch.dtype, config: Any
) -> Staging | None:
    """The staging of a call; None where it would have more chunks than there are counters."""
    if (slot.world_size - 1) * config.chunks > MAX_CHUNKS:
        return None

    def make() -> Staging:
        tiles_n = ceil_div(columns, config.block_n)
        tiles = ScatterTiles(
            num_rows, slot.world_size, slot.rank, config.block_m, tiles_n, config.group_m
        )
        shape = (columns, columns * dtype.itemsize)
        return Staging(slot, counters_of(arena), tiles, shape, config.chunks)

    return remembered(slot, (Staging, num_rows, columns, dtype, config), make)


def counters_of(arena: Arena) -> Tensor:
    """Shared by all problems of a group: its calls come one after another."""
    return zeros_of(arena, "counters of chunks", MAX_CHUNKS)
