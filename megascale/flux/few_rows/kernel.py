"""The GEMM of the kernels for few rows: tiles of a product, split along the reduction.

Products are made transposed, weight times x: 64 rows of the weight fill a tensor-core instruction
where 16 rows of x would not.

Legend: m rows, N columns, K reduction. A work is a (tile, split); a piece has the same number and
is a tile's share of columns [BLOCK_M, BLOCK_P] with BLOCK_P = BLOCK_N / SPLITS.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.signals import INTERPRETED, read_flag


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
