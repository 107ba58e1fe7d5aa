"""GEMM + reduce-scatter in one persistent Hopper kernel (Flux 3.1; engine: `hopper_gemm.py`).

Contract
  order      destinations rank + 1, ..., rank: the tiles that travel first, the own ones last
  remote     the epilogue stores its tile by TMA into the owner's slot at [rank, row, column]; the
             owner's flag [rank, tile] is set while the next tile is multiplied, after a complete
             wait of the stores (a read wait says only that shared memory is free) and a barrier
  own        while an own tile is multiplied, the producer waits for the peers' flags of that tile,
             clears them, and loads what they wrote into the free output tile; the consumers add it
             to their fp32 sums, rank + 1 first, and store the result: no barrier, no reduce pass
  sum        own partial fp32 + received tiles (rounded once, by their senders) in the order
             rank + 1, rank + 2, ...: the same on every call, so results repeat bit by bit
  deadlock   own tiles wait for tiles that peers make before any of their own; those wait for
             nothing. A program does its remote tiles before its own, so no program of a grid of
             any size waits for a later one. All ranks' kernels must come to run: nothing that a
             peer's kernel is queued behind may need this GPU's SMs (`reserved_sms` where it does).

Where the shard's rows do not divide by BLOCK_M the overhang is computed and clipped by the store.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megascale.flux.arena import Arena, Slot
from megascale.flux.gemm_reduce_scatter.protocol import ScatterTiles
from megascale.flux.hopper_gemm import (
    CONSUMER_WARPS,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    accumulator_layout,
    add_bias,
    descriptor,
    fence_async_global,
    init_ring,
    load_steps,
    multiply_steps,
    store_tile,
    tile_in_shard,
    wait_stores_written,
    weight_descriptor,
)
from megascale.flux.signals import set_flag, wait_flag
from megascale.flux.tiles import ceil_div


@gluon.jit
def _first_tile(start, program, programs):
    """The first tile number of this program that is at least `start`."""
    return start + (program + programs - start % programs) % programs


@gluon.jit
def _produce(
    x_desc,
    weight_desc,
    received_desc,
    flags_ptr,
    report_ptr,
    rank,
    tiles_m,
    tiles_n,
    shard_rows,
    k_steps,
    receive_at,
    a_ring,
    b_ring,
    full,
    empty,
    c_tile,
    c_full,
    c_free,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    KN: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    stage = 0
    phase = 0
    free_phase = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = tiles_m * tiles_n
    own = (WORLD - 1) * tiles
    for t in range(program, own, programs):
        shard = (rank + 1 + t // tiles) % WORLD
        m, n = tile_in_shard(t % tiles, tiles_m, tiles_n, GROUP_M)
        row = shard * shard_rows + m * BLOCK_M
        stage, phase = load_steps(
            x_desc, weight_desc, row, n * BLOCK_N, 0, k_steps, stage, phase,
            a_ring, b_ring, full, empty, KN, BLOCK_K, STAGES,
        )  # fmt: skip
    for t in range(_first_tile(own, program, programs), own + tiles, programs):
        tile = t - own
        m, n = tile_in_shard(tile, tiles_m, tiles_n, GROUP_M)
        row = rank * shard_rows + m * BLOCK_M
        stage, phase = load_steps(
            x_desc, weight_desc, row, n * BLOCK_N, 0, receive_at, stage, phase,
            a_ring, b_ring, full, empty, KN, BLOCK_K, STAGES,
        )  # fmt: skip
        for hop in gl.static_range(1, WORLD):
            if hop == 2:  # the first arrives during this tile's steps, the rest after them
                stage, phase = load_steps(
                    x_desc, weight_desc, row, n * BLOCK_N, receive_at, k_steps, stage, phase,
                    a_ring, b_ring, full, empty, KN, BLOCK_K, STAGES,
                )  # fmt: skip
            source = (rank + hop) % WORLD
            flag_ptr = flags_ptr + source * tiles + tile
            wait_flag(flag_ptr, report_ptr, source, tile, DEADLINE_NS)
            gl.store(flag_ptr, 0)
            fence_async_global()
            mbarrier.wait(c_free, free_phase)
            free_phase = free_phase ^ 1
            mbarrier.expect(c_full, received_desc.block_type.nbytes)
            received_row = source * shard_rows + m * BLOCK_M
            tma.async_copy_global_to_shared(
                received_desc, [received_row, n * BLOCK_N], c_full, c_tile
            )
        if WORLD <= 2:
            stage, phase = load_steps(
                x_desc, weight_desc, row, n * BLOCK_N, receive_at, k_steps, stage, phase,
                a_ring, b_ring, full, empty, KN, BLOCK_K, STAGES,
            )  # fmt: skip


@gluon.jit
def _publish(pending):
    """Set the flag at address `pending` (0: none) once every store of this program is written.

    Afterwards the output tile is free.
    """
    wait_stores_written()
    gl.thread_barrier()
    if pending != 0:
        set_flag(pending.to(gl.pointer_type(gl.int32)))


@gluon.jit
def _consume(
    out_desc,
    bias_ptr,
    data_ptrs,
    flag_ptrs,
    rank,
    tiles_m,
    tiles_n,
    shard_rows,
    k_steps,
    drain_at,
    num_columns,
    a_ring,
    b_ring,
    full,
    empty,
    c_tile,
    c_full,
    c_free,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    KN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACC: gl.constexpr,
):
    stage = 0
    phase = 0
    full_phase = 0
    pending = gl.to_tensor(0).to(gl.int64)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles = tiles_m * tiles_n
    own = (WORLD - 1) * tiles
    dtype: gl.constexpr = out_desc.dtype
    for hop in range(1, WORLD):
        dst = (rank + hop) % WORLD
        _publish(pending)  # the descriptor below takes the place of one that a store may read
        pending = pending * 0
        slot_ptr = gl.load(data_ptrs + dst).to(gl.pointer_type(dtype))
        slot_ptr += (rank * shard_rows).to(gl.int64) * num_columns
        slot_desc = tma.make_tensor_descriptor(
            slot_ptr,
            shape=[shard_rows, num_columns],
            strides=[num_columns.to(gl.int64), 1],
            block_shape=out_desc.block_shape,
            layout=out_desc.layout,
        )
        flag_base = gl.load(flag_ptrs + dst)
        begin = (hop - 1) * tiles
        for t in range(_first_tile(begin, program, programs), begin + tiles, programs):
            m, n = tile_in_shard(t - begin, tiles_m, tiles_n, GROUP_M)
            acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=ACC)
            acc, stage, phase = multiply_steps(
                acc, 0, drain_at, stage, phase, a_ring, b_ring, full, empty, KN, STAGES
            )
            _publish(pending)
            acc, stage, phase = multiply_steps(
                acc, drain_at, k_steps, stage, phase, a_ring, b_ring, full, empty, KN, STAGES
            )
            store_tile(slot_desc, m * BLOCK_M, n * BLOCK_N, acc, c_tile)
            pending = flag_base + (rank * tiles + t - begin).to(gl.int64) * 4
    for t in range(_first_tile(own, program, programs), own + tiles, programs):
        m, n = tile_in_shard(t - own, tiles_m, tiles_n, GROUP_M)
        acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=ACC)
        acc, stage, phase = multiply_steps(
            acc, 0, drain_at, stage, phase, a_ring, b_ring, full, empty, KN, STAGES
        )
        _publish(pending)
        pending = pending * 0
        mbarrier.arrive(c_free)
        acc, stage, phase = multiply_steps(
            acc, drain_at, k_steps, stage, phase, a_ring, b_ring, full, empty, KN, STAGES
        )
        if HAS_BIAS:
            acc = add_bias(acc, bias_ptr, n * BLOCK_N, num_columns, BLOCK_N, ACC)
        for received in range(1, WORLD):
            mbarrier.wait(c_full, full_phase)
            full_phase = full_phase ^ 1
            acc += c_tile.load(ACC).to(gl.float32)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(c_free, pred=received + 1 < WORLD)
        store_tile(out_desc, m * BLOCK_M, n * BLOCK_N, acc, c_tile)
    _publish(pending)


@gluon.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_hopper(
    x_desc,
    weight_desc,
    received_desc,
    out_desc,
    bias_ptr,
    data_ptrs,
    flag_ptrs,
    own_flags_ptr,
    report_ptr,
    rank,
    tiles_m,
    tiles_n,
    shard_rows,
    k_steps,
    drain_at,
    receive_at,
    num_columns,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    KN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    """At most one program an SM; see the module."""
    ACC: gl.constexpr = accumulator_layout(BLOCK_N)
    a_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], x_desc.layout)
    b_ring = gl.allocate_shared_memory(
        x_desc.dtype,
        [STAGES, weight_desc.block_shape[0], weight_desc.block_shape[1]],
        weight_desc.layout,
    )
    c_tile = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_M, BLOCK_N], out_desc.layout)
    full, empty = init_ring(STAGES)
    c_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    c_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(c_full, count=1)
    mbarrier.init(c_free, count=1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc,
                    bias_ptr,
                    data_ptrs,
                    flag_ptrs,
                    rank,
                    tiles_m,
                    tiles_n,
                    shard_rows,
                    k_steps,
                    drain_at,
                    num_columns,
                    a_ring,
                    b_ring,
                    full,
                    empty,
                    c_tile,
                    c_full,
                    c_free,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    GROUP_M,
                    WORLD,
                    KN,
                    HAS_BIAS,
                    ACC,
                ),
            ),
            (
                _produce,
                (
                    x_desc,
                    weight_desc,
                    received_desc,
                    own_flags_ptr,
                    report_ptr,
                    rank,
                    tiles_m,
                    tiles_n,
                    shard_rows,
                    k_steps,
                    receive_at,
                    a_ring,
                    b_ring,
                    full,
                    empty,
                    c_tile,
                    c_full,
                    c_free,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    GROUP_M,
                    WORLD,
                    KN,
                    DEADLINE_NS,
                ),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for the descriptors that programs make of peers' slots: 128 bytes each."""
    del alignment, stream  # torch aligns to 512 bytes and orders by the current stream
    return torch.empty(size, dtype=torch.uint8, device="cuda")


_DRAIN_STEPS = 8  # K steps after which the previous tile's store is certainly written
_RECEIVE_STEPS = 12  # K steps before the end of a tile at which what peers wrote is loaded


def launch(
    x_mK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    slot: Slot,
    arena: Arena,
    config: Any,
    layout: str,
) -> None:
    """Launch on the current stream. `out` has the own rows, [own, N]."""
    world, rank = slot.world_size, slot.rank
    columns = weight.shape[0] if layout == "NK" else weight.shape[1]
    tiles_n = ceil_div(columns, config.block_n)
    grid = ScatterTiles(x_mK.shape[0], world, rank, config.block_m, tiles_n, config.group_m)
    rows = grid.rows_per_rank
    c_block = (config.block_m, config.block_n)
    received = slot.view(rank, (world * rows, columns), x_mK.dtype)
    if out.shape[0] == 0:  # no own rows: the tiles without rows still close the call
        out = out.new_empty(1, columns)
    triton.set_allocator(_scratch)
    k_steps = ceil_div(x_mK.shape[1], config.block_k)
    drain_at = min(_DRAIN_STEPS, k_steps // 2)
    gemm_reduce_scatter_hopper[(min(arena.num_sms, grid.num_tiles),)](
        descriptor(x_mK, (config.block_m, config.block_k)),
        weight_descriptor(weight, layout, config.block_n, config.block_k),
        descriptor(received, c_block),
        descriptor(out, c_block),
        out if bias is None else bias,
        slot.data_ptrs,
        slot.flag_ptrs,
        slot.flags[rank],
        arena.report,
        rank,
        grid.tiles_m,
        tiles_n,
        rows,
        k_steps,
        drain_at,
        max(drain_at, k_steps - _RECEIVE_STEPS),
        columns,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        GROUP_M=config.group_m,
        WORLD=world,
        KN=layout == "KN",
        HAS_BIAS=bias is not None,
        DEADLINE_NS=arena.deadline_ns,
        num_warps=CONSUMER_WARPS.value,
    )
