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
  programs that wait for tiles of programs which have no place. So the grid is at most `num_sms`:
  one program an SM.

Registers, not shared memory, bound the epilogue (own and received tile at a time); no spills at
128 x 256 on sm_90.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megascale.flux.arena import Arena, Slot
from megascale.flux.gemm_config import GemmConfig
from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.portable_gemm import (
    Launches,
    add_bias,
    aligned,
    can_describe,
    describe,
    describe_weight,
    place_in_grid,
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
    x, weight, bias_ptr, out_ptr, data_ptrs, flag_ptrs, report_ptr, m, n, k, rows, rank,
    WORLD: tl.constexpr, TMA: tl.constexpr, NK: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, DEADLINE_NS: tl.constexpr,
):  # fmt: skip
    """One program an SM; see the module.

    x [m, k], weight   descriptors with TMA, else addresses
    bias [n] or None, out [own rows, n]
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
            x, row, num_rows, weight, column, n, k, TMA, NK, BLOCK_M, BLOCK_N, BLOCK_K
        )
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


_launches = Launches(gemm_reduce_scatter_kernel)


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
    """Write y_tN into `out` [own rows, N], on the current stream. All operands are contiguous.

    `slot` holds [W, c, N] of this type on every rank and a flag for each of W * tiles. With one
    rank it is a GEMM that has a slot it does not use.
    """
    operands = (x_mK, weight, bias, out)
    tensors = (*operands, slot.data_ptrs, slot.flag_ptrs, arena.report)
    key = None
    if aligned(operands):
        key = (
            x_mK.shape, weight.shape, out.dtype, layout, config, bias is None, slot.world_size,
            slot.rank, arena.num_sms, arena.deadline_ns, out.device,
        )  # fmt: skip
        if _launches.again(key, tensors):
            return
    num_programs, arguments, constants = _arguments(
        tensors, slot, arena, config, layout, are_aligned=key is not None
    )
    _launches.first(key, num_programs, arguments, constants, config)


def _arguments(
    tensors: Sequence[Any],
    slot: Slot,
    arena: Arena,
    config: GemmConfig,
    layout: Layout,
    *,
    are_aligned: bool,
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """(programs, arguments, constants) of a launch, in the order of the kernel's parameters."""
    x, weight, bias, out, data_ptrs, flag_ptrs, report = tensors
    (m, k), n = x.shape, out.shape[1]
    tiles_n = ceil_div(n, config.block_n)
    tiles = ScatterTiles(m, slot.world_size, slot.rank, config.block_m, tiles_n, config.group_m)
    tma = config.tma and are_aligned and can_describe(x.device, k, weight.shape[1])
    arguments = {
        "x": describe(x, config.block_m, config.block_k) if tma else x,
        "weight": describe_weight(weight, config, layout) if tma else weight,
        "bias_ptr": bias,
        "out_ptr": out,
        "data_ptrs": data_ptrs,
        "flag_ptrs": flag_ptrs,
        "report_ptr": report,
        "m": m,
        "n": n,
        "k": k,
        "rows": tiles.rows_per_rank,
        "rank": slot.rank,
    }
    constants = {
        "WORLD": slot.world_size,
        "TMA": tma,
        "NK": layout == "NK",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "DEADLINE_NS": arena.deadline_ns,
    }
    return min(arena.num_sms, tiles.num_tiles), arguments, constants
