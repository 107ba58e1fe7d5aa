"""The GEMM engine of the fused operators on Hopper (sm_90), in Gluon: parts shared by its kernels.

A persistent, warp-specialised kernel. One producer warp streams tiles of both operands into a ring
of shared-memory stages by TMA; eight consumer warps (two warpgroups, 64 rows each) multiply them by
wgmma into fp32 registers. The producer runs ahead over the end of a tile, so the loads of the next
tile start during the epilogue of this one: this is what a software-pipelined Triton kernel cannot
do, and it decides at small K, where a tile lasts 10 us. It is also the right place for what Flux
adds: the producer alone waits for flags (Flux 3.2), and the tensor cores keep what is in the ring.

Shared memory: STAGES x (BLOCK_M + BLOCK_N) x BLOCK_K x 2 bytes of operands and BLOCK_M x BLOCK_N
x 2 for the output tile; 213 KB at 128 x 256 x 64 with 3 stages.

Letters: A rows [BLOCK_M, BLOCK_K] of x, B of the weight ([BLOCK_N, BLOCK_K] for "NK", [BLOCK_K,
BLOCK_N] for "KN"), C the output tile.
"""

from __future__ import annotations

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


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage of the ring; the phase flips when it comes round."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The stage that was used before this one.

    Computed, not remembered: a variable that a loop body sets to another variable's entry value is
    taken for loop-invariant by Triton 3.6, silently.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def load_steps(
    a_desc,
    b_desc,
    row,
    column,
    first,
    end,
    stage,
    phase,
    a_ring,
    b_ring,
    full,
    empty,
    KN: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Producer: stream K steps [first, end) of one tile into the ring."""
    for step in range(first, end):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        k = step * BLOCK_K
        tma.async_copy_global_to_shared(a_desc, [row, k], bar, a_ring.index(stage))
        if KN:
            tma.async_copy_global_to_shared(b_desc, [k, column], bar, b_ring.index(stage))
        else:
            tma.async_copy_global_to_shared(b_desc, [column, k], bar, b_ring.index(stage))
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def multiply_steps(
    acc,
    first,
    end,
    stage,
    phase,
    a_ring,
    b_ring,
    full,
    empty,
    KN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Consumer: add K steps [first, end) to acc. All of them have been read when it returns.

    One wgmma group stays in flight while the next stage is awaited; the stage before it is given
    back then.
    """
    for step in range(first, end):
        mbarrier.wait(full.index(stage), phase)
        b = b_ring.index(stage)
        if not KN:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_ring.index(stage), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=step > first)
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=end > first)
    return acc, stage, phase


@gluon.jit
def init_ring(STAGES: gl.constexpr):
    """The (full, empty) barriers of the ring."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return full, empty


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


_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


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
