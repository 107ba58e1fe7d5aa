"""The chunked GEMM + reduce-scatter by rows: why and what it costs is said in `chunked.py`.

Legend: W ranks, T rows of all ranks, t rows of this rank (c of a full shard), R rows of a GEMM, b
rows of a block, K local reduction, N columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megascale.flux.lanes import Lanes, block_length, block_of, growing, num_blocks, receive, send
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot
    from megascale.flux.gemm_reduce_scatter.chunked import ChunkedReduceScatter


class Block(NamedTuple):
    """Rows [first, end) of the product, for `owner`; `chunk` of its shard."""

    owner: int
    chunk: int
    first: int
    end: int


class Cut(NamedTuple):
    """The blocks of a call on one rank.

    block   rows of a block, the last of a shard may have fewer
    chunks  blocks of a full shard
    remote  the GEMMs of peers' rows in order, each over neighbouring blocks
    own     blocks of the own rows
    """

    block: int
    chunks: int
    remote: tuple[tuple[Block, ...], ...]
    own: tuple[Block, ...]


@lru_cache(maxsize=1024)
def cut_rows(num_rows: int, world_size: int, rank: int, config: ChunkedReduceScatter) -> Cut:
    """Who is computed when, by rows. The order of destinations rotates by rank."""
    c = rows_per_rank(num_rows, world_size)
    block = block_length(c, config.chunks)
    chunks = num_blocks(c, block)

    def of(owner: int) -> list[Block]:
        rows = shard_rows(num_rows, world_size, owner)
        return [Block(owner, i, *block_of(*rows, block, i)) for i in range(chunks)]

    units = [u for step in range(1, world_size) for u in of((rank + step) % world_size)]
    sizes = [len(group) for group in growing(len(units), config.growth)][::-1]
    remote: list[list[Block]] = []
    start = 0
    for size in sizes:
        for position, unit in enumerate(units[start : start + size]):
            if position and unit.first == remote[-1][-1].end:
                remote[-1].append(unit)
            else:
                remote.append([unit])
        start += size
    own = of(rank)
    if not config.fold:
        length = block_length(c, config.own_blocks)
        rows = shard_rows(num_rows, world_size, rank)
        count = num_blocks(c, length)
        own = [Block(rank, i, *block_of(*rows, length, i)) for i in range(count)]
    return Cut(block, chunks, tuple(tuple(group) for group in remote), tuple(own))


class ByRows:
    """One call. Its methods queue work in the order of the peers' rows, then the own."""

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
        self.cut = cut_rows(x_TK.shape[0], arena.world_size, arena.rank, config)
        self.c = rows_per_rank(x_TK.shape[0], arena.world_size)
        self.own_start, _ = shard_rows(x_TK.shape[0], arena.world_size, arena.rank)
        self.lanes = Lanes(arena, two=config.two_streams)

    def run(self) -> None:
        remote = 0 if self.config.store else self.x_TK.shape[0] - self.y_tN.shape[0]
        partial_RN = self.x_TK.new_empty(remote, self.weight_KN.shape[1])
        done = 0
        self.lanes.fork()
        for index, blocks in enumerate(self.cut.remote):
            rows = blocks[-1].end - blocks[0].first
            with self.lanes.use(index if self.config.fold else 0):
                if self.config.store:
                    self._store(blocks)
                else:
                    self._push(blocks, partial_RN[done : done + rows])
            done += rows
        if self.config.fold:
            self._fold_own(first_lane=len(self.cut.remote))
        else:
            self._sum_own()
        self.lanes.join()
        self.arena.join()

    def _push(self, blocks: tuple[Block, ...], partial_RN: Tensor) -> None:
        """One GEMM over neighbouring blocks, then their copies."""
        start = blocks[0].first
        if partial_RN.numel():
            torch.mm(self.x_TK[start : blocks[-1].end], self.weight_KN, out=partial_RN)
        with self.arena.side():
            for block in blocks:
                data = partial_RN[block.first - start : block.end - start]
                send(
                    self.arena, self.slot, block.owner, self._flag(block), data, self._there(block)
                )

    def _store(self, blocks: tuple[Block, ...]) -> None:
        """A GEMM a block into its owner's memory. The flags wait for all of them."""
        for block in blocks:
            if block.end > block.first:
                shape = (block.end - block.first, self.weight_KN.shape[1])
                out_bN = self.slot.view(block.owner, shape, self.x_TK.dtype, self._there(block))
                torch.mm(self.x_TK[block.first : block.end], self.weight_KN, out=out_bN)
        with self.arena.side():
            for block in blocks:
                send(self.arena, self.slot, block.owner, self._flag(block), None, 0)

    def _flag(self, block: Block) -> int:
        return self.arena.rank * self.cut.chunks + block.chunk

    def _there(self, block: Block) -> int:
        """Bytes from the start of the owner's slot to the block, in this rank's slab."""
        slab = self.arena.rank
        if self.config.fold and slab > block.owner:
            slab -= 1
        row = (slab - block.owner) * self.c + block.first
        return row * self.weight_KN.shape[1] * self.x_TK.element_size()

    def _receive(self, chunk: int) -> None:
        flags = range(chunk, self.arena.world_size * self.cut.chunks, self.cut.chunks)
        on_stream = self.config.stream_wait
        receive(self.arena, self.slot, flags, self.cut.chunks, on_stream=on_stream)

    def _parts(self, num_slabs: int) -> Tensor:
        shape = (num_slabs, self.c, self.weight_KN.shape[1])
        return self.slot.view(self.arena.rank, shape, self.x_TK.dtype)

    def _fold_own(self, first_lane: int) -> None:
        """y = what was received, then y += own product, a block after the other."""
        from megascale.flux.symmetric.launch import sum_parts

        parts_WcN = self._parts(self.arena.world_size - 1)
        for lane, block in enumerate(self.cut.own, start=first_lane):
            with self.lanes.use(lane):
                self._receive(block.chunk)
                if block.end == block.first:
                    continue
                first, end = block.first - self.own_start, block.end - self.own_start
                y_bN = self.y_tN[first:end]
                if self.arena.world_size == 2 and self.bias_N is None:
                    y_bN.copy_(parts_WcN[0, first:end])
                else:
                    sum_parts(y_bN, parts_WcN[:, first:end], bias=self.bias_N)
                y_bN.addmm_(self.x_TK[block.first : block.end], self.weight_KN)

    def _sum_own(self) -> None:
        """y = own product, then in place its sum with what was received, a block after the other.

        Waits and sums are on the second stream, so that every flag is waited for once and before
        all sums that need it; the current stream goes on with the next block.
        """
        from megascale.flux.symmetric.launch import sum_parts

        parts_WcN = self._parts(self.arena.world_size)
        chunks = iter(range(self.cut.chunks))
        arrived = 0  # rows of every slab
        for block in self.cut.own:
            first, end = block.first - self.own_start, block.end - self.own_start
            y_bN = self.y_tN[first:end]
            if end > first:
                self._own_product(self.x_TK[block.first : block.end], y_bN)
            self.lanes.fork()
            with self.lanes.use(1):
                while arrived < end:
                    self._receive(next(chunks))
                    arrived += self.cut.block
                sum_parts(y_bN, parts_WcN[:, first:end], own=y_bN, rank=self.arena.rank)
        with self.lanes.use(1):
            for chunk in chunks:  # without rows in a short shard: the call still waits for everyone
                self._receive(chunk)

    def _own_product(self, x_bK: Tensor, y_bN: Tensor) -> None:
        if self.bias_N is None:
            torch.mm(x_bK, self.weight_KN, out=y_bN)
        else:
            torch.addmm(self.bias_N, x_bK, self.weight_KN, out=y_bN)
