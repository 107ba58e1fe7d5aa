"""Device functions that the kernels of several forms share, and two kernels of their own.

- `poll` and `announce` are the vector forms of `signals.wait_flag` and `set_flag`: all flags of a
  block in one round, so that 64 flags cost the time of one.
- **In band** there are no flags: the receiver polls the data itself, in words that are zero at
  rest, and the sender sends no zero (`nonzero`). That saves the fence between data and flag, which
  waits until the link has acknowledged every store of the program: one more journey. The words are
  the slot's flags, the only symmetric memory that is zero between calls; the receiver zeroes them.
- `wait_flags_kernel` and `sum_parts_kernel`: what copy engines brought.

Legend: W ranks, c rows of a part, N columns. A receiver's lanes are its sources without itself.
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
def clock(DEADLINE_NS: tl.constexpr):
    """When a wait began; 0 where it has no deadline."""
    if DEADLINE_NS == 0 or INTERPRETED:
        return tl.cast(0, tl.int64)
    else:  # noqa: RET505 - a branch at compile time: Triton refuses two returns without it
        return nanoseconds()


@triton.jit
def elapsed(block, start):
    """Nanoseconds since `start`, the same for all threads that hold a part of the block: what they
    do next may need all of them."""
    return tl.max(block.to(tl.int64) * 0 + (nanoseconds() - start))


@triton.jit
def expire(come, start, report_ptr, source, tile, DEADLINE_NS: tl.constexpr) -> None:
    """Give up where a wait for words in band is over its deadline; nothing without one."""
    if DEADLINE_NS > 0 and not INTERPRETED:
        late = (elapsed(come, start) > DEADLINE_NS) & (tl.min(come.to(tl.int32)) == 0)
        if late:
            give_up(report_ptr, source, tile)


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
            if elapsed(values, start) > DEADLINE_NS:
                missing = values == 0
                late = tl.max(tl.where(missing, source, -1), 0)
                give_up(report_ptr, late, tl.max(tl.where(missing & (source == late), tile, -1), 0))
    tl.debug_barrier()


@triton.jit
def memory_of(ptrs, peer, DTYPE: tl.constexpr):
    """The memory of `peer` as a pointer to DTYPE; its alignment is what makes accesses 16 bytes."""
    return tl.multiple_of(tl.load(ptrs + peer).to(tl.pointer_type(DTYPE)), 16)


@triton.constexpr_function
def lane_of(source, receiver):
    """Which part of the receiver's memory belongs to the source: it has none for itself."""
    return source - 1 if source > receiver else source


@triton.constexpr_function
def peer_of(step, rank, world_size):
    """The peers in ring order for step 1, 2, ...: no two ranks begin with the same one."""
    return (rank + step) % world_size


@triton.constexpr_function
def source_of(lane, receiver):
    """The rank that `lane_of` gave this lane."""
    return lane + 1 if lane >= receiver else lane


@triton.constexpr_function
def word_of(dtype):
    """The integer that carries one element in band."""
    return tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32


@triton.jit
def part_of(ptr, lane, part):
    """Where the part of a lane begins."""
    return ptr + lane * tl.cast(part, tl.int64)


@triton.jit
def peer_lanes(RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK_W: tl.constexpr):
    """(peer, is there one) of a block that addresses all peers at once, the own rank left out.

    Lanes beyond repeat the last peer, so that what is read through them is a flag that will be set.
    """
    lane = tl.arange(0, BLOCK_W)
    return (RANK + 1 + tl.minimum(lane, WORLD - 2)) % WORLD, lane < WORLD - 1


@triton.jit
def announce(
    flag_ptrs, index, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK_W: tl.constexpr
) -> None:
    """Set flag `index` at every peer, behind everything that this program has written so far."""
    peer, there = peer_lanes(RANK, WORLD, BLOCK_W)
    ptrs = tl.load(flag_ptrs + peer).to(tl.pointer_type(tl.int32)) + index
    tl.debug_barrier()
    tl.atomic_xchg(ptrs, 1, mask=there, sem="release", scope="sys")


@triton.jit
def poll_peers(
    own_flags,
    first,
    per_source,
    report_ptr,
    tile,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
) -> None:
    """Wait for flag first + source * per_source of every peer, and clear them."""
    peer, there = peer_lanes(RANK, WORLD, BLOCK_W)
    ptrs = own_flags + first + peer * per_source
    poll(ptrs, report_ptr, peer, peer * 0 + tile, DEADLINE_NS)
    tl.store(ptrs, 0, mask=there)


@triton.jit
def nonzero(value):
    """The bits of floating-point numbers as integers, none of them zero: +0.0 becomes -0.0."""
    if value.dtype.primitive_bitwidth == 16:
        bits = value.to(tl.int16, bitcast=True)
        return tl.where(bits == 0, tl.full((), -32768, tl.int16), bits)
    else:  # noqa: RET505 - a branch at compile time: Triton refuses two returns without it
        bits = value.to(tl.int32, bitcast=True)
        return tl.where(bits == 0, tl.full((), -2147483648, tl.int32), bits)


@triton.jit
def positive_zeros(value):
    """-0.0 as +0.0: whoever keeps a value has the bits of those who receive it in band."""
    return tl.where(value == 0.0, tl.zeros_like(value), value)


@triton.jit
def sum_in_band(
    own,  # fp32, any shape
    words_ptr,  # of this rank: int16 or int32 by DTYPE
    at,  # like own: where its words lie within a part
    inside,  # like own: what exists; the rest comes back as zero
    part,  # words between the parts of two sources
    report_ptr,
    tile,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """own + the parts of all peers in rank order, in fp32, as soon as every word has come.

    A round reads all words again: when the last one comes, all are in registers. The sum begins at
    +0.0, so that zeros that travelled as -0.0 and own ones give the same bits on all ranks.
    """
    total = tl.zeros_like(own)
    missing = 1
    start = clock(DEADLINE_NS)
    while missing != 0:
        total = tl.zeros_like(own)
        come = tl.full(own.shape, 1, tl.int1)
        for source in tl.static_range(WORLD):
            if source == RANK:
                total += own
            else:
                word_ptrs = words_ptr + lane_of(source, RANK) * part + at
                bits = tl.load(word_ptrs, mask=inside, other=1, volatile=True)
                come = come & (bits != 0)
                total += tl.where(inside, bits.to(DTYPE, bitcast=True).to(tl.float32), 0.0)
                expire(bits != 0, start, report_ptr, source, tile, DEADLINE_NS)
        missing = 1 - tl.min(come.to(tl.int32))
    return total


@triton.jit
def clear_band(
    words_ptr,
    at,
    inside,
    part,
    WORLD: tl.constexpr,
) -> None:
    """Zero the words that `sum_in_band` has read."""
    for lane in tl.static_range(WORLD - 1):
        zero = tl.zeros(at.shape, words_ptr.dtype.element_ty)
        tl.store(words_ptr + lane * part + at, zero, mask=inside)


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
