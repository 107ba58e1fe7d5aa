"""The relay of GEMM + reduce-scatter in one persistent Hopper kernel (engine: `hopper_gemm.py`).

The roles are those of the fused form (`gemm_reduce_scatter/hopper.py`): a producer warp, eight
consumer warps, and a carrier warp that moves output tiles while the consumers multiply on. So they
never wait for the link, nor for a turn as long as it comes before their next tile is done.

Contract, of the carrier (order and flags: protocol.py)
  hop 1     stores the tile by TMA into the owner's slot, waits until it is written (a read wait
            says only that shared memory is free), and sets the left neighbour's flag
  hops 2..  waits for the own flag of that tile and clears it, adds the tile to what is in the
            owner's slot, waits until that is done, and sets the left neighbour's flag
  own       while the tile is multiplied: waits for the flag, clears it, and loads what has been
            summed into the free output tile; the consumers add it to their fp32 sums, and the
            carrier stores the result

**By TMA**: a reducing store adds pieces of the tile as a store would move them; no register sees
them. Gluon of Triton 3.6 has no function for it, its compiler has the operation (`add_to_global`).
Atomics of threads are not what they should be here: in a warp-specialised kernel ptxas makes them
ATOMG, which waits for the old value to come back over the link, where elsewhere it makes RED.

TMA is ordered with what threads see by a proxy fence after each wait, and before each flag by the
complete wait of its group.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from megascale.flux.gemm_reduce_scatter.hopper import Grid, make_output_tile
from megascale.flux.signals import set_flag, wait_flag
from megascale.kernels.hopper_gemm import (
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    accumulator_layout,
    add_bias,
    fence_async_global,
    make_ring,
    wait_stores_but_one,
    wait_stores_written,
)


@builtin
def add_to_global(desc, coord, tile, _semantic=None):
    """Start to add a tile in shared memory, by TMA, to what is at `coord` of a descriptor.

    As `tma.async_copy_shared_to_global`. Elements are added in their type, each atomically at the
    scope of this GPU: to a peer's memory only where nobody else adds.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coord, tile.handle)


@gluon.jit
def _take_turn(flag_ptr, report_ptr, source, tile, DEADLINE_NS: gl.constexpr):
    """Wait until the predecessor is done with the tile, and put the flag back to 0."""
    wait_flag(flag_ptr, report_ptr, source, tile, DEADLINE_NS)
    gl.thread_barrier()  # every thread has seen it
    gl.store(flag_ptr, 0)
    fence_async_global()


@gluon.jit
def _produce(x_desc, weight_desc, grid, ring):
    stage = 0
    phase = 0
    for hop in range(1, grid.WORLD + 1):
        shard_row = (grid.rank + hop) % grid.WORLD * grid.shard_rows
        for tile in range(grid.first_tile(hop - 1), grid.num_tiles(), gl.num_programs(0)):
            row, column = grid.at(tile)
            stage, phase = ring.load(
                x_desc, weight_desc, shard_row + row, column, 0, grid.k_steps, stage, phase
            )


@gluon.jit
def _consume(bias_ptr, dtype: gl.constexpr, grid, ring, tile_out, HAS_BIAS: gl.constexpr):
    stage = 0
    phase = 0
    free_phase = 1  # the output tile is free at first
    full_phase = 0
    ACC: gl.constexpr = accumulator_layout(grid.BLOCK_N)
    for hop in range(1, grid.WORLD):
        for _tile in range(grid.first_tile(hop - 1), grid.num_tiles(), gl.num_programs(0)):
            acc = gl.full([grid.BLOCK_M, grid.BLOCK_N], 0.0, gl.float32, layout=ACC)
            acc, stage, phase = ring.multiply(acc, 0, grid.k_steps, stage, phase)
            mbarrier.wait(tile_out.free, free_phase)
            free_phase = free_phase ^ 1
            tile_out.hand_over(acc.to(dtype))
    for tile in range(grid.first_tile(grid.WORLD - 1), grid.num_tiles(), gl.num_programs(0)):
        acc = gl.full([grid.BLOCK_M, grid.BLOCK_N], 0.0, gl.float32, layout=ACC)
        acc, stage, phase = ring.multiply(acc, 0, grid.k_steps, stage, phase)
        if HAS_BIAS:
            _, column = grid.at(tile)
            acc = add_bias(acc, bias_ptr, column, grid.num_columns, grid.BLOCK_N, ACC)
        mbarrier.wait(tile_out.full, full_phase)
        full_phase = full_phase ^ 1
        acc += tile_out.memory.load(ACC).to(gl.float32)
        tile_out.hand_over(acc.to(dtype))


@gluon.jit
def _carry(
    received_desc,
    out_desc,
    data_ptrs,
    flag_ptrs,
    report_ptr,
    grid,
    tile_out,
    PIECES: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    ready_phase = 0
    programs = gl.num_programs(0)
    tiles = grid.num_tiles()
    right = (grid.rank + 1) % grid.WORLD
    left = (grid.rank + grid.WORLD - 1) % grid.WORLD
    own_flags_ptr = gl.load(flag_ptrs + grid.rank).to(gl.pointer_type(gl.int32))
    left_flags_ptr = gl.load(flag_ptrs + left).to(gl.pointer_type(gl.int32))
    ROWS: gl.constexpr = grid.BLOCK_M // PIECES
    for hop in range(1, grid.WORLD):
        dst = (grid.rank + hop) % grid.WORLD
        slot_ptr = gl.load(data_ptrs + dst).to(gl.pointer_type(out_desc.dtype))
        slot_desc = tma.make_tensor_descriptor(
            slot_ptr,
            shape=[grid.shard_rows, grid.num_columns],
            strides=[grid.num_columns.to(gl.int64), 1],
            block_shape=[ROWS, grid.BLOCK_N],
            layout=out_desc.layout,
        )
        for tile in range(grid.first_tile(hop - 1), tiles, programs):
            row, column = grid.at(tile)
            if hop == 1:
                mbarrier.wait(tile_out.ready, ready_phase)
                for piece in gl.static_range(PIECES):
                    part = tile_out.memory.slice(piece * ROWS, ROWS)
                    tma.async_copy_shared_to_global(slot_desc, [row + piece * ROWS, column], part)
                    wait_stores_but_one()
            else:
                flag_ptr = own_flags_ptr + (hop - 2) * tiles + tile
                _take_turn(flag_ptr, report_ptr, right, tile, DEADLINE_NS)
                mbarrier.wait(tile_out.ready, ready_phase)
                for piece in gl.static_range(PIECES):
                    part = tile_out.memory.slice(piece * ROWS, ROWS)
                    add_to_global(slot_desc, [row + piece * ROWS, column], part)
                    wait_stores_but_one()
            wait_stores_written()
            ready_phase = ready_phase ^ 1
            mbarrier.arrive(tile_out.free)
            set_flag(left_flags_ptr + (hop - 1) * tiles + tile)
    for tile in range(grid.first_tile(grid.WORLD - 1), tiles, programs):
        row, column = grid.at(tile)
        flag_ptr = own_flags_ptr + (grid.WORLD - 2) * tiles + tile
        _take_turn(flag_ptr, report_ptr, right, tile, DEADLINE_NS)
        mbarrier.expect(tile_out.full, received_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(
            received_desc, [row, column], tile_out.full, tile_out.memory
        )
        mbarrier.wait(tile_out.ready, ready_phase)  # it was added
        ready_phase = ready_phase ^ 1
        tma.async_copy_shared_to_global(out_desc, [row, column], tile_out.memory)
        tma.store_wait(0)
    wait_stores_written()


@gluon.jit(do_not_specialize=["rank"])
def in_flight_hopper(
    x_desc,
    weight_desc,
    received_desc,
    out_desc,
    bias_ptr,
    data_ptrs,
    flag_ptrs,
    report_ptr,
    rank,
    tiles_m,
    tiles_n,
    shard_rows,
    num_columns,
    k_steps,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    KN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PIECES: gl.constexpr,
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
        gl.to_tensor(0),  # of a second product: none
        C[0],
        C[1],
        GROUP_M,
        WORLD,
    )
    ring = make_ring(x_desc, weight_desc, KN, STAGES)
    tile_out = make_output_tile(out_desc)
    gl.warp_specialize(
        [
            (_consume, (bias_ptr, out_desc.dtype, grid, ring, tile_out, HAS_BIAS)),
            (_produce, (x_desc, weight_desc, grid, ring)),
            (
                _carry,
                (
                    received_desc,
                    out_desc,
                    data_ptrs,
                    flag_ptrs,
                    report_ptr,
                    grid,
                    tile_out,
                    PIECES,
                    DEADLINE_NS,
                ),
            ),
        ],
        [PRODUCER_WARPS, 1],
        [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
