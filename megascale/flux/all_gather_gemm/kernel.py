"""All-gather + GEMM in one persistent kernel: the portable engine (Flux 3.2, protocol.py).

The contract is the protocol's. What this engine adds:

- **Gate**: before a tile all threads spin on the flags of its rows, each for itself, so that each
  has acquired what it reads next (and a fence hands that to TMA); a flag that is set costs one read
  of the L2 cache a tile.
- **Own shard**: read from x through a descriptor of its own. Which of the two a tile loads through
  is a choice between two addresses before its loop: a second loop would double the shared memory.
- **Reset**: the last program to finish (a counter, which it resets too) waits for all flags, also
  those that no tile waited for, and clears them. A barrier keeps its fastest thread from clearing a
  flag that another thread has not seen. Of several launches over one gather the last one resets.
- **Deadlock**: programs wait for copy engines only, so the grid may have any size. The copies are
  enqueued before the launch.

At 128 x 256 x 64 with 3 stages on sm_90: 213 KB of shared memory, 156 registers, no spills.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megascale.flux.all_gather_gemm.config import FusedAllGather
from megascale.flux.all_gather_gemm.protocol import GatherTiles
from megascale.flux.arena import Arena, Slot
from megascale.flux.portable_gemm import (
    add_bias,
    aligned,
    can_describe,
    describe,
    describe_weight,
    order_descriptors,
    place_in_grid,
    run,
    tile_product,
)
from megascale.flux.problem import Layout
from megascale.flux.signals import clear_flag, wait_flag
from megascale.flux.tiles import ceil_div


@triton.jit
def _wait_for_rows(
    first_row, last_row, flags_ptr, report_ptr, rows, chunk_rows, chunks, rank,
    DEADLINE_NS: tl.constexpr,
):  # fmt: skip
    """Every chunk of peers that these rows touch is here. There may be no rows."""
    flag = first_row // rows * chunks + first_row % rows // chunk_rows
    last = last_row // rows * chunks + last_row % rows // chunk_rows
    while flag <= last:
        source = flag // chunks
        if source != rank:
            wait_flag(flags_ptr + flag, report_ptr, source, flag % chunks, DEADLINE_NS)
        flag += 1


@triton.jit
def _reset(
    flags_ptr, done_ptr, report_ptr, chunks, rank, WORLD: tl.constexpr, DEADLINE_NS: tl.constexpr
):  # fmt: skip
    """The last program to finish puts all flags back to 0, also those that no tile waited for."""
    tl.debug_barrier()  # all threads of this program are past their last wait
    ticket = tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        for flag in range(WORLD * chunks):
            source = flag // chunks
            if source != rank:
                wait_flag(flags_ptr + flag, report_ptr, source, flag % chunks, DEADLINE_NS)
        tl.debug_barrier()  # a thread that still spins must not meet the 0
        for flag in range(WORLD * chunks):
            if flag // chunks != rank:
                clear_flag(flags_ptr + flag)
        tl.store(done_ptr, 0)


@triton.jit(do_not_specialize=["m", "rows", "chunk_rows", "chunks", "rank", "clear"])
def all_gather_gemm_kernel(
    own_desc, own_ptr, gathered_desc, gathered_ptr, weight_desc, weight_ptr, bias_ptr,
    out_desc, out_ptr, flags_ptr, done_ptr, report_ptr,
    m, n, k, rows, chunk_rows, chunks, rank, clear,
    WORLD: tl.constexpr, STRADDLING: tl.constexpr, NK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, DEADLINE_NS: tl.constexpr,
):  # fmt: skip
    """One program an SM; see the module.

    own [own rows, k], gathered [WORLD, rows, k], weight, bias [n] or None, out [m, n]
    rows         of a full shard
    chunk_rows   of a chunk; `chunks` of them a shard, a flag each
    clear        reset the flags at the end
    """
    tiles_n = tl.cdiv(n, BLOCK_N)
    if STRADDLING:
        tiles_m = tl.cdiv(m, BLOCK_M)
        num_tiles = tiles_m * tiles_n
    else:
        tiles_m = tl.cdiv(rows, BLOCK_M)
        num_tiles = WORLD * tiles_m * tiles_n
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_m, tile_n = place_in_grid(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        if STRADDLING:
            row = (tl.cdiv(rank * rows, BLOCK_M) + tile_m) % tiles_m * BLOCK_M
        else:
            shard = (rank + tile // (tiles_m * tiles_n)) % WORLD
            row = shard * rows + tile_m * BLOCK_M
        if WORLD > 1:
            last_row = tl.minimum(row + BLOCK_M, m) - 1
            _wait_for_rows(
                row, last_row, flags_ptr, report_ptr, rows, chunk_rows, chunks, rank, DEADLINE_NS
            )
            if gathered_desc is not None:
                order_descriptors()
        x_desc, x_row, x_ptr = gathered_desc, row, gathered_ptr
        if not STRADDLING:  # noqa: SIM102 - known at compile time, the other is not
            if shard == rank:
                x_desc, x_row, x_ptr = own_desc, tile_m * BLOCK_M, own_ptr
        column = tile_n * BLOCK_N
        acc = tile_product(
            x_desc, x_row, x_ptr + x_row.to(tl.int64) * k, m - row, weight_desc, weight_ptr,
            column, n, k, NK, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        columns = column + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            acc = add_bias(acc, bias_ptr, columns, n)
        y = acc.to(out_ptr.dtype.element_ty)
        if out_desc is not None:
            out_desc.store([row, column], y)
        else:
            ys = tl.arange(0, BLOCK_M)[:, None]
            y_ptrs = out_ptr + row.to(tl.int64) * n + (ys * n + columns[None, :])
            tl.store(y_ptrs, y, mask=(ys < m - row) & (columns[None, :] < n))
    if WORLD > 1:  # noqa: SIM102 - known at compile time, the other is not
        if clear:
            _reset(flags_ptr, done_ptr, report_ptr, chunks, rank, WORLD, DEADLINE_NS)


class _Grid(NamedTuple):
    """What a launch needs of the protocol."""

    num_tiles: int
    straddling: bool
    rows_per_chunk: int
    num_chunks: int


@lru_cache(maxsize=1024)
def _grid(num_rows: int, world_size: int, n: int, config: FusedAllGather) -> _Grid:
    tiles_n = ceil_div(n, config.block_n)
    tiles = GatherTiles(
        num_rows, world_size, 0, config.block_m, tiles_n, config.group_m, config.chunks
    )
    return _Grid(tiles.num_tiles, tiles.straddling, tiles.rows_per_chunk, tiles.num_chunks)


def launch(
    x_own: Tensor,
    gathered_WcK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    slot: Slot | None,
    arena: Arena,
    config: FusedAllGather,
    layout: Layout,
    num_rows: int,
    *,
    clear: bool = True,
) -> None:
    """Write y_TN into `out` [num_rows, N], on the current stream. All operands are contiguous.

    gathered_WcK   of the own slot; the own shard is in it only where tiles straddle shards
    slot           None is one rank: the GEMM of x_own, which is `gathered_WcK` too
    clear          False keeps the flags for another launch over the same gather
    """
    world_size, rows, k = gathered_WcK.shape
    n = out.shape[1]
    grid = _grid(num_rows, world_size, n, config)
    rank, flags = (0, None) if slot is None else (slot.rank, slot.flags[slot.rank])
    all_aligned = aligned(x_own, gathered_WcK, weight, bias, out)
    tma = all_aligned and config.tma and can_describe(x_own.device, k, weight.shape[1])
    own_desc = gathered_desc = weight_desc = out_desc = None
    if tma:
        gathered_desc = describe(gathered_WcK, config.block_m, config.block_k)
        own_desc = gathered_desc
        if x_own.shape[0]:
            own_desc = describe(x_own, config.block_m, config.block_k)
        weight_desc = describe_weight(weight, config, layout)
        if can_describe(x_own.device, n):
            out_desc = describe(out, config.block_m, config.block_n)
    args = (
        own_desc, x_own, gathered_desc, gathered_WcK, weight_desc, weight, bias, out_desc, out,
        flags, arena.done, arena.report,
        num_rows, n, k, rows, grid.rows_per_chunk, grid.num_chunks, rank, int(clear),
        world_size, grid.straddling, layout == "NK", config.block_m, config.block_n,
        config.block_k, config.group_m, arena.deadline_ns,
    )  # fmt: skip
    key = (
        "ag", x_own.device, out.dtype, config, layout, n, k, world_size, grid.straddling, tma,
        bias is None, arena.deadline_ns,
    )  # fmt: skip
    num_programs = min(arena.num_sms, grid.num_tiles)
    run(all_gather_gemm_kernel, num_programs, args, config, key if all_aligned else ())
