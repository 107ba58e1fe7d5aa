"""GEMM + reduce-scatter in one persistent kernel: the portable engine (Flux 3.1, protocol.py).

The contract is the protocol's. What this engine adds:

- **Sum**: the own partial product stays in fp32 registers; the tiles of the peers, rounded once by
  their senders, are added to it in rank order, then the bias. Equal on every call, bit by bit.
- **Order of stores and flag**: a remote tile is written by ordinary stores of all threads. A
  barrier of the program orders them before the one thread that sets the flag, whose release covers
  what it has seen through the barrier. (Stores by TMA would need a complete wait where they began.)
- **Order of wait and reset**: every thread spins for itself; a barrier keeps the fastest from
  clearing a flag that another thread has not seen.
- **Deadlock**: a program does all its remote tiles, which wait for nothing, before its first own
  one. That alone is not enough: a grid larger than what is resident could fill two devices with
  programs that wait for tiles of programs which have no place. So the grid is at most `num_sms`,
  one program an SM, or has no more programs than tiles.

Registers, not shared memory, bound the epilogue (own and received tile at a time); no spills at
128 x 256 on sm_90.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from megascale.flux.arena import Arena, Slot
from megascale.flux.gemm_config import GemmConfig
from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.portable_gemm import (
    add_bias,
    aligned,
    can_describe,
    describe,
    describe_weight,
    place_in_grid,
    run,
    tile_product,
)
from megascale.flux.problem import Layout
from megascale.flux.signals import clear_flag, set_flag, wait_flag
from megascale.flux.tiles import ceil_div


@triton.jit
def _take_tile_of_peers(
    flags_ptr, report_ptr, tile, tiles_per_shard, rank, WORLD: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):  # fmt: skip
    """Wait until all peers have written this tile, and put their flags back to 0."""
    for i in range(WORLD - 1):
        source = i + (i >= rank)
        wait_flag(flags_ptr + source * tiles_per_shard, report_ptr, source, tile, DEADLINE_NS)
    tl.debug_barrier()  # a thread that still spins must not meet the 0
    for i in range(WORLD - 1):
        source = i + (i >= rank)
        clear_flag(flags_ptr + source * tiles_per_shard)


@triton.jit(do_not_specialize=["m", "rows", "rank"])
def gemm_reduce_scatter_kernel(
    x_desc, x_ptr, weight_desc, weight_ptr, bias_ptr, out_ptr, data_ptrs, flag_ptrs, report_ptr,
    m, n, k, rows, rank,
    WORLD: tl.constexpr, NK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, DEADLINE_NS: tl.constexpr,
):  # fmt: skip
    """One program an SM; see the module.

    x [m, k], weight, bias [n] or None, out [own rows, n]
    data_ptrs, flag_ptrs   int64 [WORLD]: slabs [WORLD, rows, n] of each rank, and its flags
    rows   of a full shard
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_per_shard = tiles_m * tiles_n
    for index in range(tl.program_id(0), WORLD * tiles_per_shard, tl.num_programs(0)):
        owner = (rank + 1 + index // tiles_per_shard) % WORLD
        position = index % tiles_per_shard
        tile_m, tile_n = place_in_grid(position, tiles_m, tiles_n, GROUP_M)
        shard_row = tile_m * BLOCK_M
        row = owner * rows + shard_row
        num_rows = tl.minimum(rows - shard_row, m - row)
        column = tile_n * BLOCK_N
        acc = tile_product(
            x_desc, row, x_ptr + row.to(tl.int64) * k, num_rows, weight_desc, weight_ptr,
            column, n, k, NK, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        ys = tl.arange(0, BLOCK_M)[:, None]
        columns = column + tl.arange(0, BLOCK_N)
        inside = (ys < num_rows) & (columns[None, :] < n)
        at = ys * n + columns[None, :]
        slabs_ptr = tl.load(data_ptrs + owner).to(tl.pointer_type(dtype))
        slabs_ptr = tl.multiple_of(slabs_ptr, 16)
        flags_ptr = tl.load(flag_ptrs + owner).to(tl.pointer_type(tl.int32)) + position
        if owner == rank:
            _take_tile_of_peers(
                flags_ptr, report_ptr, position, tiles_per_shard, rank, WORLD, DEADLINE_NS
            )
            for i in range(WORLD - 1):
                source = i + (i >= rank)
                slab_ptr = slabs_ptr + (source * rows + shard_row).to(tl.int64) * n
                acc += tl.load(slab_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                acc = add_bias(acc, bias_ptr, columns, n)
            tl.store(out_ptr + shard_row.to(tl.int64) * n + at, acc.to(dtype), mask=inside)
        else:
            slab_ptr = slabs_ptr + (rank * rows + shard_row).to(tl.int64) * n
            tl.store(slab_ptr + at, acc.to(dtype), mask=inside)
            tl.debug_barrier()
            set_flag(flags_ptr + rank * tiles_per_shard)


@lru_cache(maxsize=1024)
def _grid(m: int, world_size: int, n: int, config: GemmConfig) -> tuple[int, int]:
    """(rows of a full shard, tiles): what a launch needs of the protocol."""
    tiles_n = ceil_div(n, config.block_n)
    tiles = ScatterTiles(m, world_size, 0, config.block_m, tiles_n, config.group_m)
    return tiles.rows_per_rank, tiles.num_tiles


def launch(
    x_mK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    slot: Slot,
    arena: Arena,
    config: GemmConfig,
    layout: Layout,
) -> None:
    """Write y_tN into `out` [own rows, N], contiguous. All operands contiguous, on one device.

    `slot` holds [W, c, N] of this type on every rank and W * tiles flags. With one rank it is a
    GEMM that has a slot it does not use.
    """
    (m, k), n = x_mK.shape, out.shape[1]
    world_size = slot.world_size
    rows, num_tiles = _grid(m, world_size, n, config)
    all_aligned = aligned(x_mK, weight, bias, out)
    tma = all_aligned and config.tma and can_describe(x_mK.device, k, weight.shape[1])
    x_desc = weight_desc = None
    if tma:
        x_desc = describe(x_mK, config.block_m, config.block_k)
        weight_desc = describe_weight(weight, config, layout)
    args = (
        x_desc, x_mK, weight_desc, weight, bias, out, slot.data_ptrs, slot.flag_ptrs, arena.report,
        m, n, k, rows, slot.rank,
        world_size, layout == "NK", config.block_m, config.block_n, config.block_k, config.group_m,
        arena.deadline_ns,
    )  # fmt: skip
    key = (
        "rs", x_mK.device, out.dtype, config, layout, n, k, world_size, tma, bias is None,
        arena.deadline_ns,
    )  # fmt: skip
    num_programs = min(arena.num_sms, num_tiles)
    run(gemm_reduce_scatter_kernel, num_programs, args, config, key if all_aligned else ())
