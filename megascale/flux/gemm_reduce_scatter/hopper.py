"""GEMM + reduce-scatter in one persistent Hopper kernel (Flux 3.1; engine: `hopper_gemm.py`).

Beside the engine's producer and consumers a third warp, the *carrier*, moves output tiles: the
consumers hand a tile over in shared memory and go on multiplying, whatever the link is doing.

Contract
  order      destinations rank + 1, ..., rank: the tiles that travel first, the own ones last
  remote     the carrier stores the tile by TMA into the owner's slot at [rank, row, column], waits
             until it is written (a read wait says only that shared memory is free), and sets the
             owner's flag [rank, tile]. STAGED: into memory of this rank, and counts it; from there
             copy engines carry whole chunks and set the flags (`staging.py`)
  own        while an own tile is multiplied the carrier waits for a peer's flag of that tile,
             clears it and loads what the peer wrote into the free output tile; the consumers add it
             to their fp32 sums, and the carrier stores the result: no barrier, no reduce pass
  sum        own partial fp32 + received tiles (rounded once, by their senders) in rank order: the
             same on every call, so results repeat bit by bit
  deadlock   own tiles wait for tiles that peers make before any of their own; those wait for
             nothing. The whole grid is resident (a program an SM at most), so each of those is
             made. All ranks' kernels must come to run: nothing that a peer's kernel is queued
             behind may need this GPU's SMs (`reserved_sms` where it does).

The output tile belongs to the consumers until they arrive at `ready`, to the carrier until it
arrives at `free` (remote) or a received tile is in it (`full`, own).

Where the shard's rows do not divide by BLOCK_M the overhang is computed and clipped by the store.

One file of more than 300 lines: the three roles hand tiles to each other, and are read together.
Their launch is in hopper_launch.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate

from megascale.flux.signals import set_flag, wait_flag
from megascale.kernels.hopper_gemm import (
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    accumulator_layout,
    add_bias,
    fence_async_global,
    make_ring,
    tile_in_shard,
    wait_stores_but_one,
    wait_stores_written,
)


@aggregate
class Grid:
    """The tiles of a call in their order (protocol.py), as one value. Rows are of x.

    Every destination has the same grid. `k2_steps` are those of a second product that is added to
    the first; zero without one.
    """

    rank: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    shard_rows: gl.tensor
    num_columns: gl.tensor
    k_steps: gl.tensor
    k2_steps: gl.tensor
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    GROUP_M: gl.constexpr
    WORLD: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, rank, tiles_m, tiles_n, shard_rows, num_columns, k_steps, k2_steps,
        BLOCK_M, BLOCK_N, GROUP_M, WORLD,
    ):  # fmt: skip
        self.rank = rank
        self.tiles_m = tiles_m
        self.tiles_n = tiles_n
        self.shard_rows = shard_rows
        self.num_columns = num_columns
        self.k_steps = k_steps
        self.k2_steps = k2_steps
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


@aggregate
class OutputTile:
    """Shared memory between consumers and carrier, and whose it is; see the module."""

    memory: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, memory, ready, free, full):
        self.memory = memory
        self.ready = ready
        self.free = free
        self.full = full

    @gluon.jit
    def hand_over(self, value):
        """Consumers: write the tile; the carrier may move it."""
        self.memory.store(value)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(self.ready)


@gluon.jit
def make_output_tile(desc):
    """Memory for one tile of this descriptor, and its barriers."""
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(free, count=1)
    mbarrier.init(full, count=1)
    memory = gl.allocate_shared_memory(desc.dtype, desc.block_shape, desc.layout)
    return OutputTile(memory, ready, free, full)


@gluon.jit
def _produce(x_desc, weight_desc, x2_desc, weight2_desc, grid, ring, PAIR: gl.constexpr):
    stage = 0
    phase = 0
    for hop in range(1, grid.WORLD + 1):
        shard_row = (grid.rank + hop) % grid.WORLD * grid.shard_rows
        for tile in range(grid.first_tile(hop - 1), grid.num_tiles(), gl.num_programs(0)):
            row, column = grid.at(tile)
            row += shard_row
            stage, phase = ring.load(
                x_desc, weight_desc, row, column, 0, grid.k_steps, stage, phase
            )
            if PAIR:
                stage, phase = ring.load(
                    x2_desc, weight2_desc, row, column, 0, grid.k2_steps, stage, phase
                )


@gluon.jit
def _consume(bias_ptr, dtype: gl.constexpr, grid, ring, tile_out, HAS_BIAS: gl.constexpr):
    stage = 0
    phase = 0
    free_phase = 1  # the output tile is free at first
    full_phase = 0
    ACC: gl.constexpr = accumulator_layout(grid.BLOCK_N)
    steps = grid.k_steps + grid.k2_steps
    for hop in range(1, grid.WORLD):
        for _tile in range(grid.first_tile(hop - 1), grid.num_tiles(), gl.num_programs(0)):
            acc = gl.full([grid.BLOCK_M, grid.BLOCK_N], 0.0, gl.float32, layout=ACC)
            acc, stage, phase = ring.multiply(acc, 0, steps, stage, phase)
            mbarrier.wait(tile_out.free, free_phase)
            free_phase = free_phase ^ 1
            tile_out.hand_over(acc.to(dtype))
    for tile in range(grid.first_tile(grid.WORLD - 1), grid.num_tiles(), gl.num_programs(0)):
        acc = gl.full([grid.BLOCK_M, grid.BLOCK_N], 0.0, gl.float32, layout=ACC)
        acc, stage, phase = ring.multiply(acc, 0, steps, stage, phase)
        if HAS_BIAS:
            _, column = grid.at(tile)
            acc = add_bias(acc, bias_ptr, column, grid.num_columns, grid.BLOCK_N, ACC)
        for received in range(1, grid.WORLD):
            mbarrier.wait(tile_out.full, full_phase)
            full_phase = full_phase ^ 1
            acc += tile_out.memory.load(ACC).to(gl.float32)
            if received + 1 < grid.WORLD:  # the carrier may load the next one
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(tile_out.ready)
        tile_out.hand_over(acc.to(dtype))


@gluon.jit
def _carry(
    received_desc,
    out_desc,
    data_ptrs,
    flag_ptrs,
    own_flags_ptr,
    report_ptr,
    staging_ptr,
    counters_ptr,
    tiles_a_chunk,
    grid,
    tile_out,
    STAGED: gl.constexpr,
    PIECES: gl.constexpr,
    DEADLINE_NS: gl.constexpr,
):
    ready_phase = 0
    programs = gl.num_programs(0)
    tiles = grid.num_tiles()
    for hop in range(1, grid.WORLD):
        dst = (grid.rank + hop) % grid.WORLD
        if STAGED:
            slot_ptr = staging_ptr + ((hop - 1) * grid.shard_rows).to(gl.int64) * grid.num_columns
            flags_ptr = counters_ptr + (hop - 1) * ((tiles + tiles_a_chunk - 1) // tiles_a_chunk)
        else:
            slot_ptr = gl.load(data_ptrs + dst).to(gl.pointer_type(out_desc.dtype))
            slot_ptr += (grid.rank * grid.shard_rows).to(gl.int64) * grid.num_columns
            flags_ptr = gl.load(flag_ptrs + dst).to(gl.pointer_type(gl.int32)) + grid.rank * tiles
        slot_desc = tma.make_tensor_descriptor(
            slot_ptr,
            shape=[grid.shard_rows, grid.num_columns],
            strides=[grid.num_columns.to(gl.int64), 1],
            block_shape=[grid.BLOCK_M // PIECES, grid.BLOCK_N],
            layout=out_desc.layout,
        )
        for tile in range(grid.first_tile(hop - 1), tiles, programs):
            row, column = grid.at(tile)
            mbarrier.wait(tile_out.ready, ready_phase)
            ready_phase = ready_phase ^ 1
            ROWS: gl.constexpr = grid.BLOCK_M // PIECES
            for piece in gl.static_range(PIECES):
                tma.async_copy_shared_to_global(
                    slot_desc,
                    [row + piece * ROWS, column],
                    tile_out.memory.slice(piece * ROWS, ROWS),
                )
                wait_stores_but_one()
            wait_stores_written()
            mbarrier.arrive(tile_out.free)
            if STAGED:
                gl.atomic_add(flags_ptr + tile // tiles_a_chunk, 1, sem="release", scope="sys")
            else:
                set_flag(flags_ptr + tile)
    for tile in range(grid.first_tile(grid.WORLD - 1), tiles, programs):
        row, column = grid.at(tile)
        for other in range(grid.WORLD - 1):
            source = gl.where(other < grid.rank, other, other + 1)
            flag_ptr = own_flags_ptr + source * tiles + tile
            wait_flag(flag_ptr, report_ptr, source, tile, DEADLINE_NS)
            gl.thread_barrier()  # every thread has seen it
            gl.store(flag_ptr, 0)
            fence_async_global()
            mbarrier.expect(tile_out.full, received_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                received_desc,
                [source * grid.shard_rows + row, column],
                tile_out.full,
                tile_out.memory,
            )
            mbarrier.wait(tile_out.ready, ready_phase)  # it was added (the last: summed and stored)
            ready_phase = ready_phase ^ 1
        tma.async_copy_shared_to_global(out_desc, [row, column], tile_out.memory)
        tma.store_wait(0)
    wait_stores_written()


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
    staging_ptr,
    counters_ptr,
    tiles_a_chunk,
    rank,
    tiles_m,
    tiles_n,
    shard_rows,
    num_columns,
    k_steps,
    k2_steps,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    WORLD: gl.constexpr,
    KN: gl.constexpr,
    PAIR: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    STAGED: gl.constexpr,
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
        gl.to_tensor(k2_steps),
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
            (_produce, (x_desc, weight_desc, x2_desc, weight2_desc, grid, ring, PAIR)),
            (
                _carry,
                (
                    received_desc,
                    out_desc,
                    data_ptrs,
                    flag_ptrs,
                    own_flags_ptr,
                    report_ptr,
                    staging_ptr,
                    counters_ptr,
                    gl.to_tensor(tiles_a_chunk),
                    grid,
                    tile_out,
                    STAGED,
                    PIECES,
                    DEADLINE_NS,
                ),
            ),
        ],
        [PRODUCER_WARPS, 1],
        [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )
