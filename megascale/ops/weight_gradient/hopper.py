"""The weight gradient's GEMM on Hopper: main_grad[O, I] (+)= sum of grad_y[T, O]^T @ x[T, I], fp32.

A GEMM that adds to an fp32 matrix reads and writes 8 bytes a result. A library's GEMM does so
between two tiles, with the tensor cores empty: 20 % of the time at T = 2048. Here both ways are
asynchronous, beside the multiplication of the same tile or the next (`Pieces`). Each element is
added to once a call, so results repeat bit by bit.

Engine and letters: kernels/hopper_gemm.py. Both operands have T as their rows, so the A tile
[BLOCK_K, BLOCK_M] is read transposed.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.language.core import _aggregate as aggregate

from megascale.kernels.hopper_gemm import (
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    accumulator_layout,
    make_ring,
    tile_in_shard,
)


@builtin
def add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Start adding a tile of shared memory to global memory, by TMA; waited for as a store.

    Gluon 3.6 has the instruction but no name for it.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


@gluon.jit
def _produce(
    grad_0, x_0, grad_1, x_1, grad_2, x_2, grad_3, x_3, tiles_m, tiles_n, k_steps, ring,
    PAIRS: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    stage = 0
    phase = 0
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_in_shard(t, tiles_m, tiles_n, GROUP_M)
        row = m * grad_0.block_shape[1]
        column = n * x_0.block_shape[1]
        stage, phase = ring.load(grad_0, x_0, row, column, 0, k_steps, stage, phase)
        if PAIRS > 1:
            stage, phase = ring.load(grad_1, x_1, row, column, 0, k_steps, stage, phase)
        if PAIRS > 2:
            stage, phase = ring.load(grad_2, x_2, row, column, 0, k_steps, stage, phase)
        if PAIRS > 3:
            stage, phase = ring.load(grad_3, x_3, row, column, 0, k_steps, stage, phase)


@aggregate
class Pieces:
    """How a finished tile goes to memory: in COUNT pieces of columns, through COUNT / 2 buffers.

    The first half of the pieces is added in registers to old values that were loaded into the
    buffers during the multiplication; the second half is added by the TMA unit. Either alone is too
    slow: buffers for all old values do not fit, and the L2 cache adds no more than 0.54 TB/s.
    """

    buffers: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor  # a barrier: the old values are there
    COUNT: gl.constexpr
    OVERWRITE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, loaded, COUNT, OVERWRITE):
        self.buffers = buffers
        self.loaded = loaded
        self.COUNT = gl.constexpr(COUNT)
        self.OVERWRITE = gl.constexpr(OVERWRITE)

    @gluon.jit
    def fetch(self, desc, row, column):
        """Start loading the old values, once the last tile's pieces have left the buffers."""
        tma.store_wait(0)
        gl.thread_barrier()
        HALF: gl.constexpr = self.COUNT // 2
        mbarrier.expect(self.loaded, HALF * desc.block_type.nbytes)
        for i in gl.static_range(HALF):
            at = column + i * desc.block_shape[1]
            tma.async_copy_global_to_shared(desc, [row, at], self.loaded, self.buffers.index(i))

    @gluon.jit
    def leave(self, desc, row, column, tile, FIRST: gl.constexpr, NUM: gl.constexpr):
        """Pieces FIRST .. FIRST + NUM - 1, which `tile` is. Halving it only names registers."""
        if NUM > 1:
            HALF: gl.constexpr = NUM // 2
            M: gl.constexpr = tile.shape[0]
            N: gl.constexpr = tile.shape[1]
            left, right = tile.reshape([M, 2, N // 2]).permute((0, 2, 1)).split()
            self.leave(desc, row, column, left, FIRST, HALF)
            self.leave(desc, row, column + N // 2, right, FIRST + HALF, HALF)
        else:
            BUFFERS: gl.constexpr = self.COUNT // 2
            buffer = self.buffers.index(FIRST % BUFFERS)
            if FIRST >= BUFFERS or self.OVERWRITE:
                tma.store_wait(BUFFERS - 1)  # what left through this buffer has been read
                gl.thread_barrier()
            else:
                tile += buffer.load(tile.type.layout)
            buffer.store(tile)
            fence_async_shared()
            gl.thread_barrier()
            if FIRST < BUFFERS or self.OVERWRITE:
                tma.async_copy_shared_to_global(desc, [row, column], buffer)
            else:
                add_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def _consume(
    out_desc, tiles_m, tiles_n, k_steps, ring, pieces,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, FETCH: gl.constexpr,
):  # fmt: skip
    stage = 0
    phase = 0
    fetched = 0  # phase of `pieces.loaded`
    ACC: gl.constexpr = accumulator_layout(BLOCK_N)
    for t in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = tile_in_shard(t, tiles_m, tiles_n, GROUP_M)
        row = m * BLOCK_M
        column = n * BLOCK_N
        acc = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, layout=ACC)
        before = gl.minimum(FETCH, k_steps)
        acc, stage, phase = ring.multiply(acc, 0, before, stage, phase)
        if not pieces.OVERWRITE:
            pieces.fetch(out_desc, row, column)
        acc, stage, phase = ring.multiply(acc, before, k_steps, stage, phase)
        if not pieces.OVERWRITE:
            mbarrier.wait(pieces.loaded, fetched)
            fetched ^= 1
        pieces.leave(out_desc, row, column, acc, 0, pieces.COUNT)
    tma.store_wait(0)


@gluon.jit
def weight_gradient_hopper(
    grad_0,
    x_0,
    grad_1,
    x_1,
    grad_2,
    x_2,
    grad_3,
    x_3,
    out_desc,
    tiles_m,
    tiles_n,
    k_steps,
    PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    FETCH: gl.constexpr,
    OVERWRITE: gl.constexpr,
):
    """At most one program an SM. Pairs of operands behind the first PAIRS are not read.

    k_steps   of a pair
    out_desc  has blocks of one piece of the tile
    """
    A: gl.constexpr = grad_0.block_shape
    B: gl.constexpr = x_0.block_shape
    C: gl.constexpr = out_desc.block_shape
    ring = make_ring(grad_0, x_0, True, STAGES, True)
    COUNT: gl.constexpr = B[1] // C[1]
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    buffers = gl.allocate_shared_memory(gl.float32, [COUNT // 2, C[0], C[1]], out_desc.layout)
    pieces = Pieces(buffers, loaded, COUNT, OVERWRITE)
    tiles_m = gl.to_tensor(tiles_m)
    tiles_n = gl.to_tensor(tiles_n)
    k_steps = gl.to_tensor(k_steps)
    gl.warp_specialize(
        [
            (
                _consume,
                (out_desc, tiles_m, tiles_n, k_steps * PAIRS, ring, pieces, A[1], B[1], GROUP_M,
                 FETCH),
            ),
            (
                _produce,
                (grad_0, x_0, grad_1, x_1, grad_2, x_2, grad_3, x_3, tiles_m, tiles_n, k_steps,
                 ring, PAIRS, GROUP_M),
            ),
        ],
        [PRODUCER_WARPS],
        [PRODUCER_REGISTERS],
    )  # fmt: skip
