"""The chunked GEMM + reduce-scatter by columns: why and what it costs is said in `chunked.py`.

Legend: W ranks, T rows of all ranks, t rows of this rank (c of a full shard), K local reduction, N
columns, B columns of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.flux.lanes import Lanes, block_length, block_of, num_blocks, receive, send
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot
    from megascale.flux.gemm_reduce_scatter.chunked import ChunkedReduceScatter


class ByColumns:
    """One call. GEMMs run on the current stream, waits and sums on the second one.

    Without a second stream a sum comes after the next GEMM, under which its parts travel.
    """

    def __init__(
        self,
        x_TK: Tensor,
        weight_KN: Tensor,
        bias_N: Tensor | None,
        y_tN: Tensor,
        arena: Arena,
        slot: Slot,
        config: ChunkedReduceScatter,
    ) -> None:
        self.x_TK, self.weight_KN, self.bias_N, self.y_tN = x_TK, weight_KN, bias_N, y_tN
        self.arena, self.slot, self.config = arena, slot, config
        self.c = rows_per_rank(x_TK.shape[0], arena.world_size)
        self.length = block_length(weight_KN.shape[1], config.chunks)
        self.chunks = num_blocks(weight_KN.shape[1], self.length)
        self.lanes = Lanes(arena, two=config.two_streams)

    def run(self) -> None:
        num_rows, num_columns = self.x_TK.shape[0], self.weight_KN.shape[1]
        partial = self.x_TK.new_empty(num_rows * num_columns)  # its blocks are contiguous each
        behind: list[tuple[int, Tensor]] = []
        for chunk in range(self.chunks):
            first, end = block_of(0, num_columns, self.length, chunk)
            partial_TB = partial[num_rows * first : num_rows * end].view(num_rows, end - first)
            torch.mm(self.x_TK, self.weight_KN[:, first:end], out=partial_TB)
            self._push(chunk, partial_TB)
            behind.append((chunk, partial_TB))
            self.lanes.fork()
            if self.config.two_streams or chunk:
                self._sum(*behind.pop(0))
        for block in behind:
            self._sum(*block)
        self.lanes.join()
        self.arena.join()

    def _start(self, chunk: int) -> int:
        """Bytes before the slabs of a block in the slot."""
        columns = chunk * self.length
        return self.arena.world_size * self.c * columns * self.x_TK.element_size()

    def _push(self, chunk: int, partial_TB: Tensor) -> None:
        rank, world_size = self.arena.rank, self.arena.world_size
        slab_bytes = self.c * partial_TB.shape[1] * partial_TB.element_size()
        offset, flag = self._start(chunk) + rank * slab_bytes, rank * self.chunks + chunk
        with self.arena.side():
            for step in range(1, world_size):
                owner = (rank + step) % world_size
                first, end = shard_rows(self.x_TK.shape[0], world_size, owner)
                send(self.arena, self.slot, owner, flag, partial_TB[first:end], offset)

    def _sum(self, chunk: int, partial_TB: Tensor) -> None:
        from megascale.flux.symmetric.launch import sum_parts

        rank, world_size, width = self.arena.rank, self.arena.world_size, partial_TB.shape[1]
        first, end = shard_rows(self.x_TK.shape[0], world_size, rank)
        shape = (world_size, self.c, width)
        parts_WcB = self.slot.view(rank, shape, partial_TB.dtype, self._start(chunk))
        columns = slice(chunk * self.length, chunk * self.length + width)
        bias_B = None if self.bias_N is None else self.bias_N[columns]
        flags = range(chunk, world_size * self.chunks, self.chunks)
        with self.lanes.use(1):
            receive(self.arena, self.slot, flags, self.chunks, on_stream=self.config.stream_wait)
            sum_parts(
                self.y_tN[:, columns],
                parts_WcB[:, : end - first],
                own=partial_TB[first:end],
                rank=rank,
                bias=bias_B,
            )
