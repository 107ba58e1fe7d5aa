"""All-gather + GEMM in one persistent Hopper kernel (Flux 3.2; engine: `hopper_gemm.py`).

Contract
  x_own      [t, K] of this rank; read by its own descriptor, so it needs no copy into the slot
  gathered   [W, c, K] of the own slot; peers' copy engines fill shard s, then set flag [s, chunk]
  order      shards rank, rank + 1, ...: what arrives last is needed last
  gate       the producer warp waits, before the first load of a tile, for the flag of the last
             chunk that the tile's rows touch (chunks of a shard arrive in order)
  clearing   the last program to finish waits for every flag and clears it, so that a shard which
             no tile touched is accounted for too
  deadlock   no program waits for another program, only for copy engines: the grid may be larger
             or smaller than the SMs. Copies are enqueued before the launch.

Where BLOCK_M does not divide c (`STRADDLE`), tiles cover rows of two shards: one grid over all
[W * c] rows, rotated to begin at the own shard, which is then read from the slot too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from megascale.flux.all_gather_gemm.protocol import GatherTiles
from megascale.flux.arena import Arena, Slot
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
    weight_descriptor,
)
from megascale.flux.signals import wait_flag
from megascale.flux.tiles import ceil_div


@gluon.jit
def _tile_at(
    t,
    rank,
    tiles_m,
    tiles_n,
    shard_rows,
    BLOCK_M: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    STRADDLE: gl.constexpr,
):
    """(shard, row within it, first row of all, tile column) of tile number t."""
    if STRADDLE:  # tiles_m counts the rows of all shards
        m, n = tile_in_shard(t, tiles_m, tiles_n, GROUP_M)
        m = (m + (rank * shard_rows + BLOCK_M - 1) // BLOCK_M) % tiles_m
        return 0, m * BLOCK_M, m * BLOCK_M, n
    else:  # noqa: RET505 - a branch at compile time
        shard = (rank + t // (tiles_m * tiles_n)) % WORLD
        m, n = tile_in_shard(t % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        return shard, m * BLOCK_M, shard * shard_rows + m * BLOCK_M, n


@gluon.jit
def _produce(
    own_desc,
    gathered_desc,
    weight_desc,
    flags_ptr,
    done_ptr,
    report_ptr,
    rank,
    num_tiles,
    own_tiles,
    tiles_m,
    tiles_n,
    shard_rows,
    chunk_rows,
    num_rows,
    k_steps,
    a_ring,
    b_ring,
    full,
    empty,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    CHUNKS: gl.constexpr,
    KN: gl.constexpr,
    STRADDLE: gl.constexpr,
    CLEAR: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    stage = 0
    phase = 0
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    for t in range(program, own_tiles, programs):
        _, local, _, n = _tile_at(
            t, rank, tiles_m, tiles_n, shard_rows, BLOCK_M, GROUP_M, WORLD, STRADDLE
        )
        stage, phase = load_steps(
            own_desc, weight_desc, local, n * BLOCK_N, 0, k_steps, stage, phase,
            a_ring, b_ring, full, empty, KN, BLOCK_K, STAGES,
        )  # fmt: skip
    first = program + (own_tiles - program + programs - 1) // programs * programs
    gate = -1  # the last flag that was seen
    for t in range(gl.maximum(first, program), num_tiles, programs):
        shard, local, row, n = _tile_at(
            t, rank, tiles_m, tiles_n, shard_rows, BLOCK_M, GROUP_M, WORLD, STRADDLE
        )
        if STRADDLE:
            last_row = gl.minimum(row + BLOCK_M, num_rows) - 1
            begin = row // shard_rows * CHUNKS + row % shard_rows // chunk_rows
            end = last_row // shard_rows * CHUNKS + last_row % shard_rows // chunk_rows + 1
            for flag in range(begin, end):
                source = flag // CHUNKS
                if source != rank:
                    wait_flag(flags_ptr + flag, report_ptr, source, t, DEADLINE_NS)
            fence_async_global()
        else:
            last_row = gl.minimum(local + BLOCK_M, shard_rows) - 1
            needed = shard * CHUNKS + last_row // chunk_rows
            if needed != gate:
                wait_flag(flags_ptr + needed, report_ptr, shard, t, DEADLINE_NS)
                fence_async_global()
                gate = needed
        stage, phase = load_steps(
            gathered_desc, weight_desc, row, n * BLOCK_N, 0, k_steps, stage, phase,
            a_ring, b_ring, full, empty, KN, BLOCK_K, STAGES,
        )  # fmt: skip
    if CLEAR:
        ticket = gl.atomic_add(done_ptr, 1)
        if ticket == programs - 1:
            for flag in range(WORLD * CHUNKS):
                source = flag // CHUNKS
                if source != rank:
                    wait_flag(flags_ptr + flag, report_ptr, source, -1, DEADLINE_NS)
                    gl.store(flags_ptr + flag, 0)
            gl.store(done_ptr, 0)


@gluon.jit
def _consume(
    out_desc,
    bias_ptr,
    rank,
    num_tiles,
    tiles_m,
    tiles_n,
    shard_rows,
    k_steps,
    num_columns,
    a_ring,
    b_ring,
    full,
    empty,
    c_tile,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    KN: gl.constexpr,
    STRADDLE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    ACC: gl.constexpr,
):
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        _, _, row, n = _tile_at(
            t, rank, tiles_m, tiles_n, shard_rows, BLOCK_M, GROUP_M, WORLD, STRADDLE
        )
        acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=ACC)
        acc, stage, phase = multiply_steps(
            acc, 0, k_steps, stage, phase, a_ring, b_ring, full, empty, KN, STAGES
        )
        if HAS_BIAS:
            acc = add_bias(acc, bias_ptr, n * BLOCK_N, num_columns, BLOCK_N, ACC)
        tma.store_wait(0)
        gl.thread_barrier()
        store_tile(out_desc, row, n * BLOCK_N, acc, c_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rank"])
def all_gather_gemm_hopper(
    own_desc,
    gathered_desc,
    weight_desc,
    out_desc,
    bias_ptr,
    flags_ptr,
    done_ptr,
    report_ptr,
    rank,
    num_tiles,
    own_tiles,
    tiles_m,
    tiles_n,
    shard_rows,
    chunk_rows,
    num_rows,
    k_steps,
    num_columns,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    CHUNKS: gl.constexpr,
    KN: gl.constexpr,
    STRADDLE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    CLEAR: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    """One program an SM; see the module."""
    ACC: gl.constexpr = accumulator_layout(BLOCK_N)
    a_ring = gl.allocate_shared_memory(own_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], own_desc.layout)
    b_ring = gl.allocate_shared_memory(
        own_desc.dtype,
        [STAGES, weight_desc.block_shape[0], weight_desc.block_shape[1]],
        weight_desc.layout,
    )
    c_tile = gl.allocate_shared_memory(out_desc.dtype, [BLOCK_M, BLOCK_N], out_desc.layout)
    full, empty = init_ring(STAGES)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc,
                    bias_ptr,
                    rank,
                    num_tiles,
                    tiles_m,
                    tiles_n,
                    shard_rows,
                    k_steps,
                    num_columns,
                    a_ring,
                    b_ring,
                    full,
                    empty,
                    c_tile,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    GROUP_M,
                    WORLD,
                    KN,
                    STRADDLE,
                    HAS_BIAS,
                    ACC,
                ),
            ),
            (
                _produce,
                (
                    own_desc,
                    gathered_desc,
                    weight_desc,
                    flags_ptr,
                    done_ptr,
                    report_ptr,
                    rank,
                    num_tiles,
                    own_tiles,
                    tiles_m,
                    tiles_n,
                    shard_rows,
                    chunk_rows,
                    num_rows,
                    k_steps,
                    a_ring,
                    b_ring,
                    full,
                    empty,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                    GROUP_M,
                    WORLD,
                    CHUNKS,
                    KN,
                    STRADDLE,
                    CLEAR,
                    DEADLINE_NS,
                ),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )


def launch(
    x_own: Tensor,
    gathered_WcK: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    slot: Slot | None,
    arena: Arena,
    config: Any,
    layout: str,
    num_rows: int,
    *,
    clear: bool = True,
) -> None:
    """Launch on the current stream. `out` has [num_rows, N], or [W * c, N] where tiles clip shards.

    A slot of None is one rank: the plain GEMM of x_own, for comparison.
    """
    world = 1 if slot is None else slot.world_size
    rank = 0 if slot is None else slot.rank
    columns = weight.shape[0] if layout == "NK" else weight.shape[1]
    grid = GatherTiles(
        num_rows,
        world,
        rank,
        config.block_m,
        ceil_div(columns, config.block_n),
        config.group_m,
        config.chunks,
    )
    flags = arena.done if slot is None else slot.flags[rank]
    a_block = (config.block_m, config.block_k)
    gathered = gathered_WcK.view(-1, gathered_WcK.shape[-1])
    own_tiles = 0 if grid.straddling else grid.tiles_per_grid
    programs = min(arena.num_sms, grid.num_tiles)
    all_gather_gemm_hopper[(programs,)](
        descriptor(x_own if x_own.shape[0] else gathered, a_block),
        descriptor(gathered, a_block),
        weight_descriptor(weight, layout, config.block_n, config.block_k),
        descriptor(out, (config.block_m, config.block_n)),
        out if bias is None else bias,
        flags,
        arena.done,
        arena.report,
        rank,
        grid.num_tiles,
        own_tiles,
        grid.tiles_m,
        grid.tiles_n,
        grid.rows_per_rank,
        grid.rows_per_chunk,
        num_rows,
        ceil_div(x_own.shape[1], config.block_k),
        columns,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        GROUP_M=config.group_m,
        WORLD=world,
        CHUNKS=grid.num_chunks,
        KN=layout == "KN",
        STRADDLE=grid.straddling,
        HAS_BIAS=bias is not None,
        CLEAR=clear and world > 1,
        DEADLINE_NS=arena.deadline_ns,
        num_warps=CONSUMER_WARPS.value,
    )
