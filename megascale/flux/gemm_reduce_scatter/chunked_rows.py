"""The work of a chunked GEMM + reduce-scatter: why and what it costs is said in `chunked.py`.

Legend: W ranks, T rows of all ranks, t rows of this rank (c of a full shard), R rows of a GEMM, b
rows of a block, K local reduction, N columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megascale.flux.lanes import (
    Arrival,
    Lanes,
    Send,
    block_length,
    block_of,
    growing,
    num_blocks,
    push,
    remembered,
)
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
    own     blocks of the own rows, a GEMM each
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
    return Cut(block, chunks, tuple(tuple(group) for group in remote), tuple(of(rank)))


class _Remote(NamedTuple):
    """A GEMM of peers' rows [first, end). `sends` count bytes from the first row of its product;
    with `store` it goes to the owners block by block: rows, and the memory there."""

    first: int
    end: int
    sends: list[Send]
    stores: list[tuple[int, int, Tensor]]


class _Own(NamedTuple):
    """A GEMM of own rows: [first, end) of all, [start, stop) of this rank's; and what is added to
    it, `parts_SbN` in the own slot, after its arrival."""

    first: int
    end: int
    start: int
    stop: int
    arrival: Arrival
    parts_SbN: Tensor
    address: int


class _Plan:
    """Of one problem and one slot: addresses and views that cost more to make than to use."""

    def __init__(
        self,
        slot: Slot,
        num_rows: int,
        num_columns: int,
        dtype: torch.dtype,
        config: ChunkedReduceScatter,
    ) -> None:
        self._slot, self._dtype, self._num_columns = slot, dtype, num_columns
        self._fold, self._store = config.fold, config.store
        self._c = rows_per_rank(num_rows, slot.world_size)
        self._row_bytes = num_columns * dtype.itemsize
        self._cut = cut_rows(num_rows, slot.world_size, slot.rank, config)
        self.remote = [self._remote(blocks) for blocks in self._cut.remote]
        self.partial_rows = 0 if config.store else sum(r.end - r.first for r in self.remote)
        start, _ = shard_rows(num_rows, slot.world_size, slot.rank)
        self.own = [self._own(block, start) for block in self._cut.own]
        del self._slot  # what is remembered of a slot does not keep it

    def _remote(self, blocks: tuple[Block, ...]) -> _Remote:
        first, end = blocks[0].first, blocks[-1].end
        sends, stores = [], []
        for block in blocks:
            rows, there = block.end - block.first, self._there(block)
            flag = self._slot.rank * self._cut.chunks + block.chunk
            send = Send(
                self._slot.data[block.owner].data_ptr() + there,
                (block.first - first) * self._row_bytes,
                0 if self._store else rows * self._row_bytes,
                self._slot.flags[block.owner].data_ptr() + 4 * flag,
            )
            sends.append(send)
            if self._store and rows:
                shape = (rows, self._num_columns)
                out_bN = self._slot.view(block.owner, shape, self._dtype, there)
                stores.append((block.first, block.end, out_bN))
        return _Remote(first, end, sends, stores)

    def _there(self, block: Block) -> int:
        """Bytes from the start of the owner's slot to the block, in this rank's slab."""
        slab = self._slot.rank
        if self._fold and slab > block.owner:
            slab -= 1
        return ((slab - block.owner) * self._c + block.first) * self._row_bytes

    def _own(self, block: Block, start: int) -> _Own:
        slot, chunks = self._slot, self._cut.chunks
        flags = range(block.chunk, slot.world_size * chunks, chunks)
        slabs = slot.world_size - 1 if self._fold else slot.world_size
        parts_ScN = slot.view(slot.rank, (slabs, self._c, self._num_columns), self._dtype)
        first, stop = block.first - start, block.end - start
        parts_SbN = parts_ScN[:, first:stop]
        arrival = Arrival(slot, flags, chunks)
        address = slot.data[slot.rank].data_ptr() + first * self._row_bytes
        return _Own(block.first, block.end, first, stop, arrival, parts_SbN, address)


def queue_rows(
    x_TK: Tensor,
    weight_KN: Tensor,
    bias_N: Tensor | None,
    y_tN: Tensor,
    arena: Arena,
    slot: Slot,
    config: ChunkedReduceScatter,
) -> None:
    """Queue a call: GEMMs of peers' rows, each with its pushes, then the own ones with their sums.

    Lanes alternate from one GEMM to the next.
    """
    num_rows, num_columns, dtype = x_TK.shape[0], weight_KN.shape[1], x_TK.dtype
    plan = remembered(
        slot,
        ("gemm_rs", num_rows, num_columns, dtype, config),
        lambda: _Plan(slot, num_rows, num_columns, dtype, config),
    )
    partial_RN = x_TK.new_empty(plan.partial_rows, num_columns) if plan.partial_rows else y_tN
    lanes = Lanes(arena, two=config.two_streams)
    lanes.load((own.arrival for own in plan.own), slot)
    sums = [_sum_of(own, y_tN, bias_N, slot, config) for own in plan.own]  # before anything is sent
    lanes.fork()
    done = 0
    for lane, remote in enumerate(plan.remote):
        rows = remote.end - remote.first
        with lanes.use(lane):
            if config.store:
                for first, end, out_bN in remote.stores:
                    torch.mm(x_TK[first:end], weight_KN, out=out_bN)
            elif rows:
                out_RN = _rows(partial_RN, done, done + rows)
                torch.mm(x_TK[remote.first : remote.end], weight_KN, out=out_RN)
            push(arena, remote.sends, partial_RN.data_ptr() + done * num_columns * dtype.itemsize)
        done += rows
    queue_own = _queue_folded if config.fold else _queue_summed
    for lane, (own, add) in enumerate(zip(plan.own, sums, strict=True), start=len(plan.remote)):
        with lanes.use(lane):
            x_bK = x_TK[own.first : own.end]
            y_bN = _rows(y_tN, own.start, own.stop)
            queue_own(x_bK, weight_KN, bias_N, y_bN, own, lanes, lane, slot, add)
    lanes.join()
    arena.join()


def _rows(tensor: Tensor, first: int, end: int) -> Tensor:
    """Its rows [first, end): a view that is not made where that is all of them."""
    return tensor if end - first == tensor.shape[0] else tensor[first:end]


def _sum_of(
    own: _Own, y_tN: Tensor, bias_N: Tensor | None, slot: Slot, config: ChunkedReduceScatter
) -> Callable[[], None] | None:
    """The launch that adds what was received for a block; None: there is nothing to add up."""
    from megascale.flux.symmetric.launch import summing

    if own.stop == own.start or (config.fold and slot.world_size == 2 and bias_N is None):
        return None
    y_bN = _rows(y_tN, own.start, own.stop)
    if config.fold:
        return summing(y_bN, own.parts_SbN, bias=bias_N)
    return summing(y_bN, own.parts_SbN, own=y_bN, rank=slot.rank)


def _queue_folded(
    x_bK: Tensor,
    weight_KN: Tensor,
    _bias_N: Tensor | None,  # is added with what was received
    y_bN: Tensor,
    own: _Own,
    lanes: Lanes,
    lane: int,
    slot: Slot,
    add: Callable[[], None] | None,
) -> None:
    """y = what was received (of one peer as it is), then y += own product."""
    lanes.receive(lane, own.arrival, slot)
    if own.stop == own.start:
        return
    if add is None:
        num_bytes = (own.stop - own.start) * y_bN.shape[1] * y_bN.element_size()
        lanes.copy(lane, y_bN.data_ptr(), own.address, num_bytes)
    else:
        add()
    y_bN.addmm_(x_bK, weight_KN)


def _queue_summed(
    x_bK: Tensor,
    weight_KN: Tensor,
    bias_N: Tensor | None,
    y_bN: Tensor,
    own: _Own,
    lanes: Lanes,
    lane: int,
    slot: Slot,
    add: Callable[[], None] | None,
) -> None:
    """y = own product, then in place its sum with what was received."""
    if own.stop > own.start:
        if bias_N is None:
            torch.mm(x_bK, weight_KN, out=y_bN)
        else:
            torch.addmm(bias_N, x_bK, weight_KN, out=y_bN)
    lanes.receive(lane, own.arrival, slot)
    if add is not None:
        add()
