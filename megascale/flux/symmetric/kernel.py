"""Waiting for flags, and sums of what arrived: the parts that several forms share.

`poll` is the vector form of `signals.wait_flag`: one round reads all flags of a block at once, so
that waiting for 64 flags costs the time of one.

Legend: W ranks, c rows of a part, N columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.signals import INTERPRETED, nanoseconds, read_flag


@triton.jit
def give_up(report_ptr, source, tile) -> None:
    """Say on the host what was waited for, and end the kernel by a trap."""
    tl.store(report_ptr + 1, tl.cast(source, tl.int64))
    tl.store(report_ptr + 2, tl.cast(tile, tl.int64))
    tl.inline_asm_elementwise(
        "fence.sc.sys; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )
    tl.store(report_ptr, tl.cast(1, tl.int64))
    tl.inline_asm_elementwise(
        "fence.sc.sys; trap; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def poll(
    ptrs,  # int32 pointers [B]: all valid; repeat one to fill the block
    report_ptr,
    source,  # int32 [B], for the report
    tile,  # int32 [B]
    DEADLINE_NS: tl.constexpr,
) -> None:
    """Spin until every flag of the block is set. They stay set.

    What the setters had written before is visible to the whole program afterwards.
    """
    values = read_flag(ptrs)
    if DEADLINE_NS == 0 or INTERPRETED:
        while tl.min(values, 0) == 0:
            values = read_flag(ptrs)
    else:
        start = nanoseconds()
        while tl.min(values, 0) == 0:
            values = read_flag(ptrs)
            if nanoseconds() - start > DEADLINE_NS:
                missing = values == 0
                late = tl.max(tl.where(missing, source, -1), 0)
                give_up(report_ptr, late, tl.max(tl.where(missing & (source == late), tile, -1), 0))
    tl.debug_barrier()


@triton.jit
def wait_flags_kernel(
    flag_ptrs,  # int64 [W]
    report_ptr,
    rank,
    first,
    count,
    step,
    per_source,
    BLOCK: tl.constexpr,
    SKIP_OWN: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
) -> None:
    """One program: wait for flags first, first + step, ... (count of them) and clear them."""
    own = tl.load(flag_ptrs + rank).to(tl.pointer_type(tl.int32))
    for start in range(0, count, BLOCK):
        # A block that is not full repeats its last flag, and its own one is replaced by a peer's:
        # all pointers are valid and all flags will be set.
        at = first + tl.minimum(start + tl.arange(0, BLOCK), count - 1) * step
        source = at // per_source
        if SKIP_OWN:
            away = source != rank
            other = tl.max(tl.where(away, at, -1), 0)
            if other >= 0:
                at = tl.where(away, at, other)
                poll(own + at, report_ptr, at // per_source, at, DEADLINE_NS)
                tl.store(own + at, 0)
        else:
            poll(own + at, report_ptr, source, at, DEADLINE_NS)
            tl.store(own + at, 0)


@triton.jit
def sum_parts_kernel(
    out_ptr,
    parts_ptr,
    own_ptr,
    bias_ptr,
    flag_ptrs,  # int64 [W]; with WAIT
    done_ptr,  # int32 [1], zero; with WAIT
    report_ptr,
    rows,
    columns,
    stride_out,  # elements between rows
    stride_own,
    stride_part,  # elements between parts
    stride_row,  # elements between rows of a part
    first_flag,
    flags_per_source,
    rows_per_flag,
    RANK: tl.constexpr,  # of this rank: its part is not waited for; own_ptr replaces it
    WORLD: tl.constexpr,
    HAS_OWN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,  # flags read at once
    DEADLINE_NS: tl.constexpr,
) -> None:
    """out [rows, columns] = sum of the parts in rank order, in fp32 (+ bias): a tile a program.

    WAIT: the flags of the tile's rows first, at first_flag + source * flags_per_source +
    row // rows_per_flag. The last program to have waited clears all of them.
    """
    tiles_c = tl.cdiv(columns, BLOCK_C)
    tile_r = tl.program_id(0) // tiles_c
    tile_c = tl.program_id(0) % tiles_c
    first_row = tile_r * BLOCK_R
    if WAIT:
        own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32)) + first_flag
        last_row = tl.minimum(first_row + BLOCK_R, rows) - 1
        first_part = first_row // rows_per_flag
        span = last_row // rows_per_flag - first_part + 1
        for start in range(0, (WORLD - 1) * span, BLOCK_F):
            at = tl.minimum(start + tl.arange(0, BLOCK_F), (WORLD - 1) * span - 1)
            source = (RANK + 1 + at // span) % WORLD
            part = first_part + at % span
            poll(
                own_flags + source * flags_per_source + part, report_ptr, source, part, DEADLINE_NS
            )
    row = first_row + tl.arange(0, BLOCK_R)
    column = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    row = row.to(tl.int64)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for source in tl.static_range(WORLD):
        if HAS_OWN and source == RANK:
            at_own = row[:, None] * stride_own + column[None, :]
            part_RC = tl.load(own_ptr + at_own, mask=inside, other=0.0)
        else:
            part_ptr = parts_ptr + source * tl.cast(stride_part, tl.int64)
            part_RC = tl.load(
                part_ptr + row[:, None] * stride_row + column[None, :],
                mask=inside,
                other=0.0,
                eviction_policy="evict_first",
            )
        total += part_RC.to(tl.float32)
    if HAS_BIAS:
        bias_C = tl.load(bias_ptr + column, mask=column < columns, other=0.0)
        total += bias_C.to(tl.float32)[None, :]
    at_out = row[:, None] * stride_out + column[None, :]
    tl.store(out_ptr + at_out, total.to(out_ptr.dtype.element_ty), mask=inside)
    if WAIT:
        tl.debug_barrier()
        finished = tl.atomic_add(done_ptr, 1, sem="relaxed", scope="gpu")
        if finished == tl.num_programs(0) - 1:
            num_flags = (rows - 1) // rows_per_flag + 1
            for start in range(0, WORLD * num_flags, BLOCK_F):
                at = start + tl.arange(0, BLOCK_F)
                where = at // num_flags * flags_per_source + at % num_flags
                clear = (at < WORLD * num_flags) & (at // num_flags != RANK)
                tl.store(own_flags + where, 0, mask=clear)
            tl.store(done_ptr, 0)
