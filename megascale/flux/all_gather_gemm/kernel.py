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

At 128 x 256 x 64 with 3 stages on sm_90: 213 KB of shared memory, 160 registers, no spills.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megascale.flux.all_gather_gemm.config import FusedAllGather
from megascale.flux.all_gather_gemm.protocol import GatherTiles
from megascale.flux.arena import Arena, Slot
from megascale.flux.portable_gemm import (
    Launches,
    add_bias,
    aligned,
    can_describe,
    describe,
    describe_weight,
    order_descriptors,
    place_in_grid,
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
    own, gathered, weight, bias_ptr, out, flags_ptr, done_ptr, report_ptr,
    m, n, k, rows, chunk_rows, chunks, rank, clear,
    WORLD: tl.constexpr, STRADDLING: tl.constexpr, TMA: tl.constexpr, TMA_OUT: tl.constexpr,
    NK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, DEADLINE_NS: tl.constexpr,
):  # fmt: skip
    """One program an SM; see the module.

    own [own rows, k], gathered [WORLD * rows, k], weight: descriptors with TMA, else addresses
    out [m, n]   a descriptor with TMA_OUT
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
            if TMA:
                order_descriptors()
        x, x_row = gathered, row
        if not STRADDLING:  # noqa: SIM102 - known at compile time, the other is not
            if shard == rank:
                x, x_row = own, tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        acc = tile_product(
            x, x_row, m - row, weight, column, n, k, TMA, NK, BLOCK_M, BLOCK_N, BLOCK_K
        )
        columns = column + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            acc = add_bias(acc, bias_ptr, columns, n)
        if TMA_OUT:
            out.store([row, column], acc.to(out.dtype))
        else:
            ys = tl.arange(0, BLOCK_M)[:, None]
            out_ptrs = out + row.to(tl.int64) * n + (ys * n + columns[None, :])
            inside = (ys < m - row) & (columns[None, :] < n)
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=inside)
    if WORLD > 1:  # noqa: SIM102 - known at compile time, the other is not
        if clear:
            _reset(flags_ptr, done_ptr, report_ptr, chunks, rank, WORLD, DEADLINE_NS)


_launches = Launches(all_gather_gemm_kernel)


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
    prepared(
        x_own, gathered_WcK, weight, bias, out, slot, arena, config, layout, num_rows, clear=clear
    )()


def prepared(
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
) -> Callable[[], None]:
    """What `launch` with these launches: compiled and loaded here, before rows are pushed."""
    x_first = x_own if x_own.shape[0] else gathered_WcK  # no own rows: any address will do
    flags = None if slot is None else slot.flags[slot.rank]
    operands = (x_first, gathered_WcK, weight, bias, out)
    tensors = (*operands, flags, arena.done, arena.report)
    key = None
    if aligned(operands):
        key = (
            num_rows, gathered_WcK.shape, weight.shape, out.dtype, layout, config, bias is None,
            clear, slot is None, arena.rank, arena.num_sms, arena.deadline_ns, out.device,
        )  # fmt: skip
    make = partial(
        _arguments, tensors, arena, config, layout, num_rows, clear=clear,
        are_aligned=key is not None,
    )  # fmt: skip
    return _launches.prepared(key, tensors, make, config)


def _arguments(
    tensors: Sequence[Any],
    arena: Arena,
    config: FusedAllGather,
    layout: Layout,
    num_rows: int,
    *,
    clear: bool,
    are_aligned: bool,
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(programs, arguments, constants) of a launch, in the order of the kernel's parameters."""
    own, gathered, weight, bias, out, flags, done, report = tensors
    world_size, rows, k = gathered.shape
    n = out.shape[1]
    rank = 0 if flags is None else arena.rank
    block_m, block_n = config.block_m, config.block_n
    tiles = GatherTiles(
        num_rows, world_size, rank, block_m, ceil_div(n, block_n), config.group_m, config.chunks
    )
    tma = config.tma and are_aligned and can_describe(out.device, k, weight.shape[1])
    tma_out = tma and can_describe(out.device, n)
    arguments = {
        "own": describe(own, block_m, config.block_k) if tma else own,
        "gathered": describe(gathered, block_m, config.block_k) if tma else gathered,
        "weight": describe_weight(weight, config, layout) if tma else weight,
        "bias_ptr": bias,
        "out": describe(out, block_m, block_n) if tma_out else out,
        "flags_ptr": flags,
        "done_ptr": done,
        "report_ptr": report,
        "m": num_rows,
        "n": n,
        "k": k,
        "rows": rows,
        "chunk_rows": tiles.rows_per_chunk,
        "chunks": tiles.num_chunks,
        "rank": rank,
        "clear": int(clear),
    }
    constants = {
        "WORLD": world_size,
        "STRADDLING": tiles.straddling,
        "TMA": tma,
        "TMA_OUT": tma_out,
        "NK": layout == "NK",
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "DEADLINE_NS": arena.deadline_ns,
    }
    return min(arena.num_sms, tiles.num_tiles), arguments, constants
