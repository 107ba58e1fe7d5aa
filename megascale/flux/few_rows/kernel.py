"""Kernels of the form "few_rows": contract and order of waits in the package's docstring.

Products are made transposed, weight times x: 64 rows of the weight fill a tensor-core instruction
where 16 rows of x would not.

Legend: m rows, N columns, K reduction. A work is a (tile, split); a piece has the same number and
is a tile's share of columns [BLOCK_M, BLOCK_P] with BLOCK_P = BLOCK_N / SPLITS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.signals import INTERPRETED, read_flag
from megascale.flux.symmetric.gather.kernel import push_shard
from megascale.flux.symmetric.kernel import (
    announce,
    clear_band,
    lane_of,
    memory_of,
    nonzero,
    part_of,
    peer_of,
    poll,
    poll_peers,
    sum_in_band,
    word_of,
)
from megascale.flux.symmetric.one_shot.kernel import greet_the_idle, share_of


@triton.jit
def transposed_product(
    x_ptr,  # [rows, k]
    w_ptr,  # [columns, k] if NK else [k, columns]
    rows,
    columns,
    k,
    tile_m,
    tile_n,
    split,
    NK: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_N, BLOCK_M]: the split's share of W x^T. Rows and columns beyond the ends repeat
    others (or are zero), and are not stored later."""
    row = tl.minimum(tile_m * BLOCK_M + tl.arange(0, BLOCK_M), rows - 1)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    per_split = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    first = split * per_split
    end = tl.minimum(first + per_split, k)
    x_ptrs = x_ptr + row[:, None] * k + (first + step)[None, :]
    if NK:
        kept = tl.minimum(column, columns - 1).to(tl.int64)
        w_ptrs = w_ptr + kept[:, None] * k + (first + step)[None, :]
    else:
        w_ptrs = w_ptr + (first + step).to(tl.int64)[:, None] * columns + column[None, :]
    product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, end, BLOCK_K):
        if EVEN_K:
            x_MK = tl.load(x_ptrs)
        else:
            x_MK = tl.load(x_ptrs, mask=(start + step)[None, :] < k, other=0.0)
        if NK and EVEN_K:
            w_NK = tl.load(w_ptrs, eviction_policy="evict_first")
        elif NK:
            there = (start + step)[None, :] < k
            w_NK = tl.load(w_ptrs, mask=there, other=0.0, eviction_policy="evict_first")
        elif EVEN_K and EVEN_N:
            w_NK = tl.trans(tl.load(w_ptrs, eviction_policy="evict_first"))
        else:
            there = ((start + step)[:, None] < k) & (column[None, :] < columns)
            w_KN = tl.load(w_ptrs, mask=there, other=0.0, eviction_policy="evict_first")
            w_NK = tl.trans(w_KN)
        if INTERPRETED:
            product += tl.dot(w_NK.to(tl.float32), tl.trans(x_MK.to(tl.float32)))
        else:
            product = tl.dot(w_NK, tl.trans(x_MK), product)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K if NK else BLOCK_K * tl.cast(columns, tl.int64)
    return product


@triton.jit
def prefetch_weight(
    w_ptr,
    columns,
    k,
    tile_n,
    split,
    NK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH_K: tl.constexpr,
) -> None:
    """The first PREFETCH_K steps of a work's weight on their way into L2: lines of 128 bytes."""
    LINE: tl.constexpr = 64  # elements
    first = split * tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    if NK:
        row = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), columns - 1).to(tl.int64)
        at = tl.minimum(first + tl.arange(0, PREFETCH_K // LINE) * LINE, k - 1)
        ptrs = w_ptr + row[:, None] * k + at[None, :]
    else:
        row = tl.minimum(first + tl.arange(0, PREFETCH_K), k - 1).to(tl.int64)
        at = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N // LINE) * LINE, columns - 1)
        ptrs = w_ptr + row[:, None] * columns + at[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def place_of(work, tiles_m, SPLITS: tl.constexpr):
    """(tile row, tile column, split). Tile rows of a weight tile are neighbours: L2 serves them."""
    tile = work // SPLITS
    return tile % tiles_m, tile // tiles_m, work % SPLITS


@triton.jit
def store_split(
    product, partials_ptr, tickets_ptr, work, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """A split's tile into the own slot, and one more on the tile's ticket."""
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(partials_ptr + tl.cast(work, tl.int64) * (BLOCK_M * BLOCK_N) + at, tl.trans(product))
    tl.debug_barrier()
    tl.atomic_add(tickets_ptr + work // SPLITS, 1, sem="release", scope="gpu")


@triton.jit
def reduce_splits(
    partials_ptr, tickets_ptr, work, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_P]: the piece, summed in split order once all splits have come.

    The last one to leave puts the ticket back.
    """
    tile, share = work // SPLITS, work % SPLITS
    come = read_flag(tickets_ptr + tile)
    while come < SPLITS:
        come = read_flag(tickets_ptr + tile)
    tl.debug_barrier()
    BLOCK_P: tl.constexpr = BLOCK_N // SPLITS
    column = share * BLOCK_P + tl.arange(0, BLOCK_P)
    at = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + column[None, :]
    tile_ptr = partials_ptr + tl.cast(tile * SPLITS, tl.int64) * (BLOCK_M * BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_P), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(tile_ptr + split * BLOCK_M * BLOCK_N + at)
    left = tl.atomic_add(tickets_ptr + tile, 1, sem="relaxed", scope="gpu")
    if left == 2 * SPLITS - 1:
        tl.store(tickets_ptr + tile, 0)
    return total


@triton.jit
def piece_at(work, tiles_m, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows [BLOCK_M], columns [BLOCK_P]) of a piece."""
    tile_m, tile_n, share = place_of(work, tiles_m, SPLITS)
    BLOCK_P: tl.constexpr = BLOCK_N // SPLITS
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, tile_n * BLOCK_N + share * BLOCK_P + tl.arange(0, BLOCK_P)


@triton.jit
def push_piece(
    value,  # fp32 [BLOCK_M, BLOCK_P]
    y_ptr,
    data_ptrs,
    flag_ptrs,
    row,
    column,
    work,
    works,
    rows,
    columns,
    share,
    part,
    SCATTER: tl.constexpr,
    IN_BAND: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """The piece to every peer, or each peer's rows of it; the own rows wait in y for the sum."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    value = value.to(DTYPE)
    for step in tl.static_range(1, WORLD):
        first, size = share_of(peer_of(step, RANK, WORLD), share, rows, SCATTER)
        inside = (row >= first) & (row < first + size)
        inside = inside[:, None] & (column < columns)[None, :]
        at = (row - first.to(tl.int32))[:, None] * columns + column[None, :]
        lane = lane_of(RANK, peer_of(step, RANK, WORLD))
        if IN_BAND:
            to_ptr = memory_of(flag_ptrs, peer_of(step, RANK, WORLD), word_of(DTYPE))
            tl.store(part_of(to_ptr, lane, part) + at, nonzero(value), mask=inside)
        else:
            to_ptr = memory_of(data_ptrs, peer_of(step, RANK, WORLD), DTYPE)
            tl.store(part_of(to_ptr, lane, part) + at, value, mask=inside)
    if not IN_BAND:
        announce(flag_ptrs, RANK * works + work, RANK, WORLD, BLOCK_W)
    first, size = share_of(RANK, share, rows, SCATTER)
    inside = (row >= first) & (row < first + size)
    at = (row - first.to(tl.int32))[:, None] * columns + column[None, :]
    tl.store(y_ptr + at, value, mask=inside[:, None] & (column < columns)[None, :])


@triton.jit
def collect_piece(
    y_ptr,
    bias_ptr,
    data_ptrs,
    flag_ptrs,
    report_ptr,
    row,
    column,
    work,
    works,
    rows,
    columns,
    share,
    part,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_BAND: tl.constexpr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
) -> None:
    """y = the own rows of the piece, summed over ranks in rank order, plus the bias."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    first, size = share_of(RANK, share, rows, SCATTER)
    inside = ((row >= first) & (row < first + size))[:, None] & (column < columns)[None, :]
    at = (row - first.to(tl.int32))[:, None] * columns + column[None, :]
    own = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if IN_BAND:
        words_ptr = memory_of(flag_ptrs, RANK, word_of(DTYPE))
        total = sum_in_band(
            own, words_ptr, at, inside, part, report_ptr, work, RANK, WORLD, DTYPE, DEADLINE_NS
        )
        clear_band(words_ptr, at, inside, part, WORLD)
    else:
        own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
        poll_peers(own_flags, work, works, report_ptr, work, RANK, WORLD, BLOCK_W, DEADLINE_NS)
        received_ptr = memory_of(data_ptrs, RANK, DTYPE)
        total = tl.zeros_like(own)
        for source in tl.static_range(WORLD):
            if source == RANK:
                total += own
            else:
                from_ptr = part_of(received_ptr, lane_of(source, RANK), part)
                total += tl.load(from_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
        total += bias.to(tl.float32)[None, :]
    tl.store(y_ptr + at, total.to(DTYPE), mask=inside)


@triton.jit
def gemm_sum_kernel(
    x_ptr,  # [rows, k]
    w_ptr,  # [columns, k] if NK else [k, columns]
    bias_ptr,  # [columns]
    y_ptr,  # [rows, columns], with SCATTER the own rows of it
    data_ptrs,  # int64 [W]
    flag_ptrs,  # int64 [W]
    tickets_ptr,  # int32 [tiles], zero
    report_ptr,
    rows,
    columns,
    k,
    share,  # rows of a rank; rows without SCATTER
    part,  # elements between sources in flag words or data
    partials,  # fp32 elements of the own slot's data before the splits' tiles
    tiles_m,
    works,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_BAND: tl.constexpr,
    NK: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_W: tl.constexpr,
    MULTIPLY: tl.constexpr,
    COLLECT: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """y = the sum over ranks of x W: all of it, or the own rows (SCATTER).

    MULTIPLY, COLLECT  the phases of this launch: both, but one by one in the interpreter
    """
    programs = tl.num_programs(0)
    partials_ptr = memory_of(data_ptrs, RANK, tl.float32) + partials
    if MULTIPLY:
        for work in range(tl.program_id(0), works, programs):
            tile_m, tile_n, split = place_of(work, tiles_m, SPLITS)
            product = transposed_product(
                x_ptr, w_ptr, rows, columns, k, tile_m, tile_n, split,
                NK, SPLITS, EVEN_K, EVEN_N, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if SPLITS > 1:
                store_split(product, partials_ptr, tickets_ptr, work, SPLITS, BLOCK_M, BLOCK_N)
            else:
                row, column = piece_at(work, tiles_m, SPLITS, BLOCK_M, BLOCK_N)
                push_piece(
                    tl.trans(product), y_ptr, data_ptrs, flag_ptrs, row, column, work, works,
                    rows, columns, share, part, SCATTER, IN_BAND, RANK, WORLD, BLOCK_W,
                )  # fmt: skip
    if COLLECT:
        if SPLITS > 1:
            for work in range(tl.program_id(0), works, programs):
                value = reduce_splits(partials_ptr, tickets_ptr, work, SPLITS, BLOCK_M, BLOCK_N)
                row, column = piece_at(work, tiles_m, SPLITS, BLOCK_M, BLOCK_N)
                push_piece(
                    value, y_ptr, data_ptrs, flag_ptrs, row, column, work, works,
                    rows, columns, share, part, SCATTER, IN_BAND, RANK, WORLD, BLOCK_W,
                )  # fmt: skip
        if SCATTER and IN_BAND:
            greet_the_idle(flag_ptrs, report_ptr, share, rows, RANK, WORLD, DEADLINE_NS)
        tl.debug_barrier()  # y has the own values; the pushes leave before the first look
        for work in range(tl.program_id(0), works, programs):
            row, column = piece_at(work, tiles_m, SPLITS, BLOCK_M, BLOCK_N)
            collect_piece(
                y_ptr, bias_ptr, data_ptrs, flag_ptrs, report_ptr, row, column, work, works,
                rows, columns, share, part,
                SCATTER, HAS_BIAS, IN_BAND, RANK, WORLD, BLOCK_W, DEADLINE_NS,
            )  # fmt: skip


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


@triton.jit
def store_piece(value, y_ptr, bias_ptr, row, column, rows, columns, HAS_BIAS: tl.constexpr) -> None:
    """The piece plus its bias into y."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
        value += bias.to(tl.float32)[None, :]
    at = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=inside)
