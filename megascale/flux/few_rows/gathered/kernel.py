"""A GEMM of few rows that first gathers them: pushers send while all programs prefetch the weight.

Order of a program, and why it cannot deadlock: `megascale.flux.few_rows`. Works and pieces:
`few_rows/kernel.py`. Flag of (source, pusher): source * pushers + pusher, the own ones included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.few_rows.kernel import (
    piece_at,
    place_of,
    prefetch_weight,
    reduce_splits,
    store_split,
    transposed_product,
)
from megascale.flux.signals import INTERPRETED
from megascale.flux.symmetric.gather.kernel import push_shard
from megascale.flux.symmetric.kernel import memory_of, poll


@triton.jit
def push_and_tell(
    x_ptr, data_ptrs, flag_ptrs, pushers, blocks, share, total,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr,
) -> None:  # fmt: skip
    """The program's part of the own rows into every slot, and its flag at every rank, this too."""
    program = tl.program_id(0)
    if program < pushers:
        push_shard(x_ptr, data_ptrs, program, pushers, blocks, share, total, RANK, WORLD, BLOCK_X)
        lane = tl.arange(0, BLOCK_W)
        flag = tl.load(flag_ptrs + (RANK + lane) % WORLD).to(tl.pointer_type(tl.int32))
        tl.debug_barrier()
        tl.atomic_xchg(
            flag + RANK * pushers + program, 1, mask=lane < WORLD, sem="release", scope="sys"
        )


@triton.jit
def wait_for_rows(
    flag_ptrs, done_ptr, report_ptr, pushers,
    RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK_F: tl.constexpr, DEADLINE_NS: tl.constexpr,
) -> None:  # fmt: skip
    """All rows are in the own slot. The last program to know it clears the flags."""
    own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
    num_flags = WORLD * pushers
    for start in range(0, num_flags, BLOCK_F):
        at = tl.minimum(start + tl.arange(0, BLOCK_F), num_flags - 1)
        poll(own_flags + at, report_ptr, at // pushers, at % pushers, DEADLINE_NS)
    if tl.atomic_add(done_ptr, 1, sem="relaxed", scope="gpu") == tl.num_programs(0) - 1:
        for start in range(0, num_flags, BLOCK_F):
            at = start + tl.arange(0, BLOCK_F)
            tl.store(own_flags + at, 0, mask=at < num_flags)
        tl.store(done_ptr, 0)


@triton.jit
def store_piece(value, y_ptr, bias_ptr, row, column, rows, columns, HAS_BIAS: tl.constexpr) -> None:
    """The piece plus its bias into y."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
        value += bias.to(tl.float32)[None, :]
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gather_gemm_kernel(
    x_ptr,  # own rows [t, k]
    w_ptr,  # [columns, k] if NK else [k, columns]
    bias_ptr,  # [columns]
    y_ptr,  # [rows, columns]
    data_ptrs,  # int64 [W]
    flag_ptrs,  # int64 [W]
    tickets_ptr,  # int32 [tiles], zero
    done_ptr,  # int32 [1], zero
    report_ptr,
    rows,
    columns,
    k,
    share,  # elements of a full shard
    total,  # elements of all
    pushers,
    blocks,  # that a pusher sends
    partials,  # fp32 elements of the own slot's data before the splits' tiles
    tiles_m,
    works,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    GATHER: tl.constexpr,  # False for further weights of the same rows
    HAS_BIAS: tl.constexpr,
    NK: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PREFETCH_K: tl.constexpr,
    PUSH: tl.constexpr,
    MULTIPLY: tl.constexpr,
    COLLECT: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """y = the rows of all ranks times W. The rows are in the own slot afterwards.

    PUSH, MULTIPLY, COLLECT  the phases of this launch: all, but one by one in the interpreter
    """
    programs = tl.num_programs(0)
    partials_ptr = memory_of(data_ptrs, RANK, tl.float32) + partials
    if GATHER and PUSH:
        if PREFETCH_K > 0 and not INTERPRETED:
            first_m, first_n, first_split = place_of(tl.program_id(0), tiles_m, SPLITS)
            if tl.program_id(0) < works and first_m == 0:
                prefetch_weight(
                    w_ptr, columns, k, first_n, first_split,
                    NK, SPLITS, BLOCK_N, BLOCK_K, PREFETCH_K,
                )  # fmt: skip
        push_and_tell(
            x_ptr, data_ptrs, flag_ptrs, pushers, blocks, share, total,
            RANK, WORLD, BLOCK_X, BLOCK_W,
        )  # fmt: skip
    if MULTIPLY:
        if GATHER:
            wait_for_rows(
                flag_ptrs, done_ptr, report_ptr, pushers, RANK, WORLD, BLOCK_F, DEADLINE_NS
            )
        gathered_ptr = memory_of(data_ptrs, RANK, x_ptr.dtype.element_ty)
        for work in range(tl.program_id(0), works, programs):
            tile_m, tile_n, split = place_of(work, tiles_m, SPLITS)
            product = transposed_product(
                gathered_ptr, w_ptr, rows, columns, k, tile_m, tile_n, split,
                NK, SPLITS, EVEN_K, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if SPLITS > 1:
                store_split(product, partials_ptr, tickets_ptr, work, SPLITS, BLOCK_M, BLOCK_N)
            else:
                row, column = piece_at(work, tiles_m, SPLITS, BLOCK_M, BLOCK_N)
                store_piece(
                    tl.trans(product), y_ptr, bias_ptr, row, column, rows, columns, HAS_BIAS
                )
    if SPLITS > 1 and COLLECT:
        for work in range(tl.program_id(0), works, programs):
            value = reduce_splits(partials_ptr, tickets_ptr, work, SPLITS, BLOCK_M, BLOCK_N)
            row, column = piece_at(work, tiles_m, SPLITS, BLOCK_M, BLOCK_N)
            store_piece(value, y_ptr, bias_ptr, row, column, rows, columns, HAS_BIAS)
