"""All-gather by one kernel, for shares too small for copy engines.

Bytes are moved, not numbers: x is seen as integers, and every bit arrives. In band, a word of 4
bytes travels as 8 with a 1 beside it, because any pattern is legal in the data; the link carries
twice the bytes, which are few.

No deadlock: a program sends its piece of the own shard before it waits for that of the others.

Legend: elements are counted flat; rank r owns elements [r * share, (r + 1) * share) of `total`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.signals import clear_flag, set_flag, wait_flag
from megascale.flux.symmetric.kernel import (
    announce,
    clock,
    expire,
    lane_of,
    memory_of,
    part_of,
    peer_of,
    poll_peers,
    source_of,
)
from megascale.flux.symmetric.one_shot.kernel import share_of


@triton.jit
def gather_in_band_kernel(
    x_ptr,  # int32
    y_ptr,  # int32
    flag_ptrs,  # int64 [W]
    report_ptr,
    share,
    total,
    part,  # words of 8 bytes between sources; 16 divides it
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """y = the shares of all ranks. One block of each share a program.

    A rank without rows sends a flag in place of its first word. As in `receive_sums`, every round
    stores what it finds.
    """
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    first, size = share_of(RANK, share, total, True)
    value = tl.load(x_ptr + at, mask=at < size, other=0)
    word = (value.to(tl.int64) & 0xFFFFFFFF) | (tl.full((), 1, tl.int64) << 32)
    for step in tl.static_range(1, WORLD):
        words_ptr = memory_of(flag_ptrs, peer_of(step, RANK, WORLD), tl.int64)
        words_ptr = part_of(words_ptr, lane_of(RANK, peer_of(step, RANK, WORLD)), part)
        tl.store(words_ptr + at, word, mask=at < size)
        if (size == 0) & (program == 0):
            set_flag(words_ptr.to(tl.pointer_type(tl.int32)))
    tl.store(y_ptr + first + at, value, mask=at < size)
    tl.debug_barrier()  # the pushes leave before the first look for an answer
    words_ptr = memory_of(flag_ptrs, RANK, tl.int64)
    missing = 1
    start = clock(DEADLINE_NS)
    while missing != 0:
        come = tl.full((BLOCK,), 1, tl.int1)
        for lane in tl.static_range(WORLD - 1):
            first, size = share_of(source_of(lane, RANK), share, total, True)
            word_ptrs = part_of(words_ptr, lane, part) + at
            found = tl.load(word_ptrs, mask=at < size, other=1, volatile=True)
            come = come & (found != 0)
            tl.store(y_ptr + first + at, found.to(tl.int32), mask=at < size)
            expire(found != 0, start, report_ptr, source_of(lane, RANK), program, DEADLINE_NS)
        missing = 1 - tl.min(come.to(tl.int32))
    for lane in tl.static_range(WORLD - 1):
        _, size = share_of(source_of(lane, RANK), share, total, True)
        word_ptrs = part_of(words_ptr, lane, part) + at
        tl.store(word_ptrs, tl.zeros((BLOCK,), tl.int64), mask=at < size)
        if (size == 0) & (program == 0):
            flag_ptr = part_of(words_ptr, lane, part).to(tl.pointer_type(tl.int32))
            wait_flag(flag_ptr, report_ptr, source_of(lane, RANK), 0, DEADLINE_NS)
            clear_flag(flag_ptr)


@triton.jit
def push_shard(
    x_ptr,
    data_ptrs,
    program,
    programs,
    blocks_a_program,
    share,
    total,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The program's blocks of the own shard into the slot of every rank, the own one included."""
    first, size = share_of(RANK, share, total, True)
    for block in range(blocks_a_program):
        at = (block * programs + program) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x_ptr + at, mask=at < size, other=0)
        for step in tl.static_range(1, WORLD + 1):
            to_ptr = memory_of(data_ptrs, peer_of(step, RANK, WORLD), x_ptr.dtype.element_ty)
            to_ptr += first
            tl.store(to_ptr + at, value, mask=at < size)


@triton.jit
def gather_by_flags_kernel(
    x_ptr,  # integers
    data_ptrs,  # int64 [W]
    flag_ptrs,  # int64 [W]
    report_ptr,
    share,
    total,
    blocks_a_program,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """The slot's data = the shares of all ranks. Flag: source * programs + program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    push_shard(
        x_ptr, data_ptrs, program, programs, blocks_a_program, share, total, RANK, WORLD, BLOCK
    )
    announce(flag_ptrs, RANK * programs + program, RANK, WORLD, BLOCK_W)
    own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
    poll_peers(own_flags, program, programs, report_ptr, program, RANK, WORLD, BLOCK_W, DEADLINE_NS)
