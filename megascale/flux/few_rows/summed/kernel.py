"""A GEMM of few rows whose epilogue exchanges and sums the tiles: with all-reduce all of them on
every rank, with reduce-scatter (SCATTER) each rank's rows on that rank.

Order of a program, and why it cannot deadlock: `megascale.flux.few_rows`. Works and pieces:
`few_rows/kernel.py`. Flag of (source, piece), where pieces are not sent in band: source * works +
piece.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.few_rows.kernel import (
    piece_at,
    place_of,
    reduce_splits,
    store_split,
    transposed_product,
)
from megascale.flux.symmetric.kernel import (
    announce,
    clear_band,
    lane_of,
    memory_of,
    nonzero,
    part_of,
    peer_of,
    poll_peers,
    sum_in_band,
    word_of,
)
from megascale.flux.symmetric.one_shot.kernel import greet_the_idle, share_of


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
