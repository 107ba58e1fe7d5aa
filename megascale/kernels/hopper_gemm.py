"""The GEMM engine of the fused operators on Hopper (sm_90), in Gluon: parts shared by its kernels.

A persistent, warp-specialised kernel. One producer warp streams tiles of both operands into a ring
of shared-memory stages by TMA; eight consumer warps (two warpgroups, 64 rows each) multiply them by
wgmma into fp32 registers. The producer runs ahead over the end of a tile, so the loads of the next
tile start during the epilogue of this one: this is what a software-pipelined Triton kernel cannot
do, and it decides at small K, where a tile lasts 10 us. It is also the right place for what Flux
adds: the producer alone waits for flags (Flux 3.2), and the tensor cores keep what is in the ring.

Shared memory: STAGES x (BLOCK_M + BLOCK_N) x BLOCK_K x 2 bytes of operands and BLOCK_M x BLOCK_N
x 2 for the output tile; 213 KB at 128 x 256 x 64 with 3 stages.

Letters: A rows [BLOCK_M, BLOCK_K] of x ([BLOCK_K, BLOCK_M] where KM), B of the weight ([BLOCK_N,
BLOCK_K] for "NK", [BLOCK_K, BLOCK_N] for "KN"), C the output tile.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

CONSUMER_WARPS = gl.constexpr(8)
PRODUCER_WARPS = gl.constexpr(1)
PRODUCER_REGISTERS = gl.constexpr(56)  # a thread; what the consumers do not get


@gluon.jit
def fence_async_global():
    """What this thread has seen through ordinary loads orders its TMA accesses that follow."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_stores_but_one():
    """At most one TMA store of this thread is not written yet."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 1; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_stores_written():
    """All TMA stores of this thread are written and visible, not merely read from shared memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def tile_in_shard(t, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Tile (m, n) number t: groups of GROUP_M tile rows, column by column (tiles.py)."""
    group_size = GROUP_M * tiles_n
    group = t // group_size
    first = group * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    within = t % group_size
    return first + within % rows, within // rows


@aggregate
class Ring:
    """The stages of shared memory between producer and consumers, as one value.

    a, b         operand tiles [STAGES, ...]
    full, empty  a barrier a stage: it has been loaded; it has been read
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    KM: gl.constexpr
    KN: gl.constexpr
    BLOCK_K: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, a, b, full, empty, KM, KN, BLOCK_K, STAGES):
        self.a = a
        self.b = b
        self.full = full
        self.empty = empty
        self.KM = gl.constexpr(KM)
        self.KN = gl.constexpr(KN)
        self.BLOCK_K = gl.constexpr(BLOCK_K)
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def after(self, stage, phase):
        """The next stage; the phase flips when the ring comes round."""
        stage += 1
        wrapped = stage == self.STAGES
        return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)

    @gluon.jit
    def before(self, stage):
        """The stage that was used before this one.

        Computed, not remembered: a variable that a loop body sets to another variable's entry value
        is taken for loop-invariant by Triton 3.6, silently.
        """
        return gl.where(stage == 0, self.STAGES - 1, stage - 1)

    @gluon.jit
    def load(self, a_desc, b_desc, row, column, first, end, stage, phase):
        """Producer: stream K steps [first, end) of the tile at (row of A, column of C)."""
        for step in range(first, end):
            mbarrier.wait(self.empty.index(stage), phase ^ 1)
            bar = self.full.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            k = step * self.BLOCK_K
            if self.KM:
                tma.async_copy_global_to_shared(a_desc, [k, row], bar, self.a.index(stage))
            else:
                tma.async_copy_global_to_shared(a_desc, [row, k], bar, self.a.index(stage))
            if self.KN:
                tma.async_copy_global_to_shared(b_desc, [k, column], bar, self.b.index(stage))
            else:
                tma.async_copy_global_to_shared(b_desc, [column, k], bar, self.b.index(stage))
            stage, phase = self.after(stage, phase)
        return stage, phase

    @gluon.jit
    def multiply(self, acc, first, end, stage, phase):
        """Consumer: add K steps [first, end) to acc. All have been read when it returns.

        One wgmma group stays in flight while the next stage is awaited; the stage before it is
        given back then.
        """
        for step in range(first, end):
            mbarrier.wait(self.full.index(stage), phase)
            a = self.a.index(stage)
            if self.KM:
                a = a.permute((1, 0))
            b = self.b.index(stage)
            if not self.KN:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(self.empty.index(self.before(stage)), pred=step > first)
            stage, phase = self.after(stage, phase)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(self.empty.index(self.before(stage)), pred=end > first)
        return acc, stage, phase


@gluon.jit
def make_ring(
    a_desc,
    b_desc,
    KN: gl.constexpr,
    STAGES: gl.constexpr,
    KM: gl.constexpr = False,
):
    """Shared memory and barriers for tiles that these descriptors load."""
    A: gl.constexpr = a_desc.block_shape
    B: gl.constexpr = b_desc.block_shape
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return Ring(
        gl.allocate_shared_memory(a_desc.dtype, [STAGES, A[0], A[1]], a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [STAGES, B[0], B[1]], b_desc.layout),
        full,
        empty,
        KM,
        KN,
        A[0] if KM else A[1],
        STAGES,
    )


@gluon.jit
def store_tile(desc, row, column, acc, c_tile):
    """Start the TMA store of acc. `c_tile` must be free, and is busy until the store is waited for.

    Storing it in halves, to make room for a fourth stage of the ring, gained nothing (docs/log.md).
    """
    c_tile.store(acc.to(desc.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(desc, [row, column], c_tile)


@gluon.jit
def add_bias(acc, bias_ptr, column, n, BLOCK_N: gl.constexpr, ACC: gl.constexpr):
    """acc + bias of these columns."""
    columns = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, ACC))
    bias = gl.load(bias_ptr + columns, mask=columns < n, other=0.0)
    return acc + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.constexpr_function
def accumulator_layout(BLOCK_N: int) -> gl.NVMMADistributedLayout:
    """fp32 [128, BLOCK_N] over two warpgroups, 64 rows each."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[CONSUMER_WARPS.value, 1], instr_shape=[16, BLOCK_N, 16]
    )


_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@cache
def _layout(block: tuple[int, int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[dtype])


def descriptor(tensor: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """What TMA needs to know of a contiguous matrix that is read or written in such blocks."""
    return TensorDescriptor(
        tensor, list(tensor.shape), list(tensor.stride()), list(block), _layout(block, tensor.dtype)
    )


def weight_descriptor(weight: Tensor, layout: str, block_n: int, block_k: int) -> TensorDescriptor:
    """The same of a weight in either layout."""
    return descriptor(weight, (block_n, block_k) if layout == "NK" else (block_k, block_n))
