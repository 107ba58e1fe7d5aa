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

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

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
    make_ring,
    store_tile,
    tile_in_shard,
    wait_stores_written,
    weight_descriptor,
)
from megascale.flux.signals import set_flag, wait_flag
from megascale.flux.tiles import ceil_div


@aggregate
class Grid:
    """The tiles of a call in their order (protocol.py), as one value. Rows are of x.

    Every destination has the same grid. The K steps of the first product are [0, k_steps), those of
    a second one (PAIR), which is added to it, follow up to `all_steps`.
    """

    rank: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    shard_rows: gl.tensor
    num_columns: gl.tensor
    k_steps: gl.tensor
    all_steps: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    GROUP_M: gl.constexpr
    WORLD: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, rank, tiles_m, tiles_n, shard_rows, num_columns, k_steps, all_steps,
        BLOCK_M, BLOCK_N, GROUP_M, WORLD,
    ):  # fmt: skip
        self.rank = rank
        self.tiles_m = tiles_m
        self.tiles_n = tiles_n
        self.shard_rows = shard_rows
        self.num_columns = num_columns
        self.k_steps = k_steps
        self.all_steps = all_steps
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.GROUP_M = gl.constexpr(GROUP_M)
        self.WORLD = gl.constexpr(WORLD)

    @gluon.jit
    def num_tiles(self):
        """Tiles of one destination."""
        return self.tiles_m * self.tiles_n

    @gluon.jit
    def at(self, tile):
        """(row within the destination, column) of its tile."""
        m, n = tile_in_shard(tile, self.tiles_m, self.tiles_n, self.GROUP_M)
        return m * self.BLOCK_M, n * self.BLOCK_N

    @gluon.jit
    def first_tile(self, hop):
        """This program's first tile of the destination `hop` places behind the first one."""
        program = gl.program_id(0)
        programs = gl.num_programs(0)
        before = hop * self.num_tiles()  # tiles of the destinations before
        return (program + programs - before % programs) % programs


@gluon.jit
def _load(
    grid, ring, x_desc, weight_desc, x2_desc, weight2_desc,
    row, column, first, end, stage, phase, PAIR: gl.constexpr,
):  # fmt: skip
    """Producer: K steps [first, end) of one product, or of two one after the other."""
    split = grid.k_steps
    stage, phase = ring.load(
        x_desc, weight_desc, row, column, first, gl.minimum(end, split), stage, phase
    )
    if PAIR:
        stage, phase = ring.load(
            x2_desc, weight2_desc, row, column,
            gl.maximum(first - split, 0), end - split, stage, phase,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def _produce(
    x_desc,
    weight_desc,
    x2_desc,
    weight2_desc,
    received_desc,
    flags_ptr,
    report_ptr,
    receive_at,
    grid,
    ring,
    c_tile,
    c_full,
    c_free,
    PAIR: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    stage = 0
    phase = 0
    free_phase = 0
    programs = gl.num_programs(0)
    tiles = grid.num_tiles()
    for hop in range(1, grid.WORLD):
        shard_row = (grid.rank + hop) % grid.WORLD * grid.shard_rows
        for tile in range(grid.first_tile(hop - 1), tiles, programs):
            row, column = grid.at(tile)
            stage, phase = _load(
                grid, ring, x_desc, weight_desc, x2_desc, weight2_desc,
                shard_row + row, column, 0, grid.all_steps, stage, phase, PAIR,
            )  # fmt: skip
    shard_row = grid.rank * grid.shard_rows
    for tile in range(grid.first_tile(grid.WORLD - 1), tiles, programs):
        row, column = grid.at(tile)
        # What the first peer wrote is loaded during this tile's steps, the rest after them.
        stage, phase = _load(
            grid, ring, x_desc, weight_desc, x2_desc, weight2_desc,
            shard_row + row, column, 0, receive_at, stage, phase, PAIR,
        )  # fmt: skip
        for hop in range(1, grid.WORLD):
            source = (grid.rank + hop) % grid.WORLD
            flag_ptr = flags_ptr + source * tiles + tile
            wait_flag(flag_ptr, report_ptr, source, tile, DEADLINE_NS)
            gl.store(flag_ptr, 0)
            fence_async_global()
            mbarrier.wait(c_free, free_phase)
            free_phase = free_phase ^ 1
            mbarrier.expect(c_full, received_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                received_desc, [source * grid.shard_rows + row, column], c_full, c_tile
            )
            if hop == 1:
                stage, phase = _load(
                    grid, ring, x_desc, weight_desc, x2_desc, weight2_desc,
                    shard_row + row, column, receive_at, grid.all_steps, stage, phase, PAIR,
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
    drain_at,
    grid,
    ring,
    c_tile,
    c_full,
    c_free,
    HAS_BIAS: gl.constexpr,
):
    stage = 0
    phase = 0
    full_phase = 0
    pending = gl.to_tensor(0).to(gl.int64)
    programs = gl.num_programs(0)
    tiles = grid.num_tiles()
    ACC: gl.constexpr = accumulator_layout(grid.BLOCK_N)
    for hop in range(1, grid.WORLD):
        dst = (grid.rank + hop) % grid.WORLD
        _publish(pending)  # the descriptor below takes the place of one that a store may read
        pending = pending * 0
        slot_ptr = gl.load(data_ptrs + dst).to(gl.pointer_type(out_desc.dtype))
        slot_ptr += (grid.rank * grid.shard_rows).to(gl.int64) * grid.num_columns
        slot_desc = tma.make_tensor_descriptor(
            slot_ptr,
            shape=[grid.shard_rows, grid.num_columns],
            strides=[grid.num_columns.to(gl.int64), 1],
            block_shape=out_desc.block_shape,
            layout=out_desc.layout,
        )
        flags = gl.load(flag_ptrs + dst) + (grid.rank * tiles).to(gl.int64) * 4
        for tile in range(grid.first_tile(hop - 1), tiles, programs):
            row, column = grid.at(tile)
            acc = gl.full([grid.BLOCK_M, grid.BLOCK_N], 0.0, gl.float32, layout=ACC)
            acc, stage, phase = ring.multiply(acc, 0, drain_at, stage, phase)
            _publish(pending)
            acc, stage, phase = ring.multiply(acc, drain_at, grid.all_steps, stage, phase)
            store_tile(slot_desc, row, column, acc, c_tile)
            pending = flags + tile.to(gl.int64) * 4  # type: ignore[attr-defined] # a tensor
    for tile in range(grid.first_tile(grid.WORLD - 1), tiles, programs):
        row, column = grid.at(tile)
        acc = gl.full([grid.BLOCK_M, grid.BLOCK_N], 0.0, gl.float32, layout=ACC)
        acc, stage, phase = ring.multiply(acc, 0, drain_at, stage, phase)
        _publish(pending)
        pending = pending * 0
        mbarrier.arrive(c_free)
        acc, stage, phase = ring.multiply(acc, drain_at, grid.all_steps, stage, phase)
        if HAS_BIAS:
            acc = add_bias(acc, bias_ptr, column, grid.num_columns, grid.BLOCK_N, ACC)
        for received in range(1, grid.WORLD):
            mbarrier.wait(c_full, full_phase)
            full_phase = full_phase ^ 1
            acc += c_tile.load(ACC).to(gl.float32)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(c_free, pred=received + 1 < grid.WORLD)
        store_tile(out_desc, row, column, acc, c_tile)
    _publish(pending)


@gluon.jit(do_not_specialize=["rank"])
def gemm_reduce_scatter_hopper(
    x_desc,
    weight_desc,
    x2_desc,
    weight2_desc,
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
    num_columns,
    k_steps,
    all_steps,
    drain_at,
    receive_at,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    KN: gl.constexpr,
    PAIR: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    """At most one program an SM; see the module."""
    C: gl.constexpr = out_desc.block_shape
    grid = Grid(
        rank,
        gl.to_tensor(tiles_m),
        gl.to_tensor(tiles_n),
        gl.to_tensor(shard_rows),
        gl.to_tensor(num_columns),
        gl.to_tensor(k_steps),
        gl.to_tensor(all_steps),
        C[0],
        C[1],
        GROUP_M,
        WORLD,
    )
    ring = make_ring(x_desc, weight_desc, KN, STAGES)
    c_tile = gl.allocate_shared_memory(out_desc.dtype, C, out_desc.layout)
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
                    drain_at,
                    grid,
                    ring,
                    c_tile,
                    c_full,
                    c_free,
                    HAS_BIAS,
                ),
            ),
            (
                _produce,
                (
                    x_desc,
                    weight_desc,
                    x2_desc,
                    weight2_desc,
                    received_desc,
                    own_flags_ptr,
                    report_ptr,
                    receive_at,
                    grid,
                    ring,
                    c_tile,
                    c_full,
                    c_free,
                    PAIR,
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
    *,
    pair: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Launch on the current stream. `out` has the own rows, [own, N].

    pair  a second (x [m, K2], weight) whose product is added before the sum over ranks
    """
    world, rank = slot.world_size, slot.rank
    columns = weight.shape[0] if layout == "NK" else weight.shape[1]
    tiles_n = ceil_div(columns, config.block_n)
    grid = ScatterTiles(x_mK.shape[0], world, rank, config.block_m, tiles_n, config.group_m)
    rows = grid.rows_per_rank
    a_block, c_block = (config.block_m, config.block_k), (config.block_m, config.block_n)
    received = slot.view(rank, (world * rows, columns), x_mK.dtype)
    if out.shape[0] == 0:  # no own rows: the tiles without rows still close the call
        out = out.new_empty(1, columns)
    triton.set_allocator(_scratch)
    k_steps = all_steps = ceil_div(x_mK.shape[1], config.block_k)
    if pair is not None:
        all_steps += ceil_div(pair[0].shape[1], config.block_k)
    drain_at = min(_DRAIN_STEPS, all_steps // 2)
    x_desc = descriptor(x_mK, a_block)
    weight_desc = weight_descriptor(weight, layout, config.block_n, config.block_k)
    x2_desc, weight2_desc = x_desc, weight_desc
    if pair is not None:
        x2_desc = descriptor(pair[0], a_block)
        weight2_desc = weight_descriptor(pair[1], layout, config.block_n, config.block_k)
    gemm_reduce_scatter_hopper[(min(arena.num_sms, grid.num_tiles),)](
        x_desc,
        weight_desc,
        x2_desc,
        weight2_desc,
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
        columns,
        k_steps,
        all_steps,
        drain_at,
        max(drain_at, all_steps - _RECEIVE_STEPS),
        STAGES=config.num_stages,
        GROUP_M=config.group_m,
        WORLD=world,
        KN=layout == "KN",
        PAIR=pair is not None,
        HAS_BIAS=bias is not None,
        DEADLINE_NS=arena.deadline_ns,
        num_warps=CONSUMER_WARPS.value,
    )
