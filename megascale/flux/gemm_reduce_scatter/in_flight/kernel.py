"""The relay of GEMM + reduce-scatter in one persistent kernel: the portable engine (protocol.py).

What it adds to the protocol, beside what the kernel of the fused form says of stores, flags and the
size of the grid (`gemm_reduce_scatter/kernel.py`):

- **Addition** at the owner by vector atomics without a result (RED, 16 bytes a thread; fp16 before
  Hopper: 4), which do not wait for the link. Where there are none (bf16 before Hopper, rows of no
  multiple of 16 bytes) the tile is read, added to in fp32 and stored: nobody else writes to it.
- **Order of wait and addition**: every thread spins for itself, so all of them have acquired what
  the predecessor wrote; a barrier keeps the fastest from clearing the flag too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megascale.flux.arena import Arena, Slot
from megascale.flux.gemm_config import HOPPER, GemmConfig, capability_of
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


def has_atomics(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """The device adds vectors of this type in memory; what it has not is a loop of exchanges."""
    return dtype == torch.float16 or capability >= HOPPER


@triton.jit
def _take_turn(flag_ptr, report_ptr, source, tile, DEADLINE_NS: tl.constexpr):
    """Wait until the predecessor is done with the tile, and put the flag back to 0."""
    wait_flag(flag_ptr, report_ptr, source, tile, DEADLINE_NS)
    tl.debug_barrier()  # a thread that still spins must not meet the 0
    clear_flag(flag_ptr)


@triton.jit(do_not_specialize=["m", "rows", "rank"])
def in_flight_kernel(
    x, weight, bias_ptr, out_ptr, data_ptrs, flag_ptrs, report_ptr, m, n, k, rows, rank,
    WORLD: tl.constexpr, TMA: tl.constexpr, NK: tl.constexpr, EIGHTHS: tl.constexpr,
    ATOMIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, DEADLINE_NS: tl.constexpr,
):  # fmt: skip
    """One program an SM; see the module.

    x [m, k], weight   descriptors with TMA, else addresses
    bias [n] or None, out [own rows, n]
    data_ptrs, flag_ptrs   int64 [WORLD]: the shard [rows, n] of each rank, and its flags
    rows   of a full shard
    EIGHTHS   8 divides n; ATOMIC: tiles are added by atomics
    """
    if EIGHTHS:
        n = n // 8 * 8  # so that the compiler knows, and handles 16 bytes of a row at a time
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_per_shard = tiles_m * tiles_n
    right = (rank + 1) % WORLD
    own_flags_ptr = tl.load(flag_ptrs + rank).to(tl.pointer_type(tl.int32))
    left_flags_ptr = tl.load(flag_ptrs + (rank + WORLD - 1) % WORLD).to(tl.pointer_type(tl.int32))
    for index in range(tl.program_id(0), WORLD * tiles_per_shard, tl.num_programs(0)):
        hops = index // tiles_per_shard  # before this one
        owner = (right + hops) % WORLD
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
        at = shard_row.to(tl.int64) * n + (ys * n + columns[None, :])
        shard_ptr = tl.multiple_of(tl.load(data_ptrs + owner).to(tl.pointer_type(dtype)), 16)
        turn_ptr = own_flags_ptr + (index - tiles_per_shard)  # from the second hop on
        if owner == rank:
            if WORLD > 1:
                _take_turn(turn_ptr, report_ptr, right, position, DEADLINE_NS)
                acc += tl.load(shard_ptr + at, mask=inside, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                acc = add_bias(acc, bias_ptr, columns, n)
            tl.store(out_ptr + at, acc.to(dtype), mask=inside)
        else:
            if hops == 0:
                tl.store(shard_ptr + at, acc.to(dtype), mask=inside)
            else:
                _take_turn(turn_ptr, report_ptr, right, position, DEADLINE_NS)
                if ATOMIC:
                    there = shard_ptr + at
                    tl.atomic_add(there, acc.to(dtype), mask=inside, sem="relaxed", scope="sys")
                else:
                    acc += tl.load(shard_ptr + at, mask=inside, other=0.0).to(tl.float32)
                    tl.store(shard_ptr + at, acc.to(dtype), mask=inside)
            tl.debug_barrier()
            set_flag(left_flags_ptr + index)


_launches = Launches(in_flight_kernel)


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

    `slot` holds [c, N] of this type on every rank and a flag for each of (W - 1) * tiles.
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
        "EIGHTHS": n % 8 == 0,
        "ATOMIC": n % 8 == 0 and has_atomics(out.dtype, capability_of(out.device)),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "DEADLINE_NS": arena.deadline_ns,
    }
    return min(arena.num_sms, tiles.num_tiles), arguments, constants
