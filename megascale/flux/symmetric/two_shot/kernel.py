"""All-reduce in two hops: the owner of a share sums it, then sends the sum to everybody.

Moves 2 (W - 1) / W of the message over each link where one hop moves W - 1 of it, for one journey
more. Of two ranks both move the same, so one hop is always better there.

All ranks get the bits that the owner computed. No deadlock: a program waits only for the same
program of its peers, and for what that one sends before it waits itself (its own piece), or after
it has received what everybody sends first (the sum).

Legend: elements are counted flat; rank d owns elements [d * share, (d + 1) * share) of `total`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.symmetric.kernel import (
    announce,
    clear_band,
    clock,
    expire,
    lane_of,
    memory_of,
    nonzero,
    part_of,
    peer_of,
    poll_peers,
    positive_zeros,
    source_of,
    sum_in_band,
    word_of,
)
from megascale.flux.symmetric.one_shot.kernel import push_in_band, share_of


@triton.jit
def two_shot_in_band_kernel(
    x_ptr,
    y_ptr,
    flag_ptrs,  # int64 [W]
    report_ptr,
    share,
    total,
    part,  # words between sources; 16 divides it
    blocks,  # of each share, a program
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """y = the sum of x over ranks.

    Words: W - 1 parts of partial values, then W - 1 parts of sums.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORD: tl.constexpr = word_of(DTYPE)
    program, programs = tl.program_id(0), tl.num_programs(0)
    first, size = share_of(RANK, share, total, True)
    for block in range(blocks):
        at = (block * programs + program) * BLOCK + tl.arange(0, BLOCK)
        push_in_band(x_ptr, flag_ptrs, at, share, total, part, RANK, WORLD, True)
    words_ptr = memory_of(flag_ptrs, RANK, WORD)
    tl.debug_barrier()  # the pushes leave before the first look for an answer
    for block in range(blocks):
        at = (block * programs + program) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        own = tl.load(x_ptr + first + at, mask=inside, other=0.0).to(tl.float32)
        y = sum_in_band(
            own, words_ptr, at, inside, part, report_ptr, program, RANK, WORLD, DTYPE, DEADLINE_NS
        ).to(DTYPE)
        for step in tl.static_range(1, WORLD):
            sums_ptr = memory_of(flag_ptrs, peer_of(step, RANK, WORLD), WORD)
            lane = WORLD - 1 + lane_of(RANK, peer_of(step, RANK, WORLD))
            tl.store(part_of(sums_ptr, lane, part) + at, nonzero(y), mask=inside)
        tl.store(y_ptr + first + at, positive_zeros(y), mask=inside)
        tl.debug_barrier()
        clear_band(words_ptr, at, inside, part, WORLD)
    for block in range(blocks):
        at = (block * programs + program) * BLOCK + tl.arange(0, BLOCK)
        receive_sums(
            y_ptr, words_ptr + (WORLD - 1) * part, at, share, total, part, report_ptr, RANK, WORLD,
            DTYPE, DEADLINE_NS
        )  # fmt: skip


@triton.jit
def receive_sums(
    y_ptr,
    words_ptr,
    at,
    share,
    total,
    part,
    report_ptr,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
) -> None:
    """Store what peers summed, until all of it has come; zero the words.

    Every round stores what it finds, the last one what is right: no second read when the last word
    has come, and accesses of 16 bytes, which a mask by word would split.
    """
    missing = 1
    start = clock(DEADLINE_NS)
    while missing != 0:
        come = tl.full(at.shape, 1, tl.int1)
        for lane in tl.static_range(WORLD - 1):
            first, size = share_of(source_of(lane, RANK), share, total, True)
            word_ptrs = part_of(words_ptr, lane, part) + at
            bits = tl.load(word_ptrs, mask=at < size, other=1, volatile=True)
            come = come & (bits != 0)
            value = positive_zeros(bits.to(DTYPE, bitcast=True))
            tl.store(y_ptr + first + at, value, mask=at < size)
            expire(
                bits != 0, start, report_ptr, source_of(lane, RANK), tl.program_id(0), DEADLINE_NS
            )
        missing = 1 - tl.min(come.to(tl.int32))
    for lane in tl.static_range(WORLD - 1):
        _, size = share_of(source_of(lane, RANK), share, total, True)
        zero = tl.zeros(at.shape, words_ptr.dtype.element_ty)
        tl.store(part_of(words_ptr, lane, part) + at, zero, mask=at < size)


@triton.jit
def two_shot_by_flags_kernel(
    x_ptr,
    y_ptr,
    data_ptrs,  # int64 [W]
    flag_ptrs,  # int64 [W]
    report_ptr,
    share,
    total,
    part,  # elements between sources; 16 divides it
    num_rounds,
    blocks_a_round,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    VIEW: tl.constexpr,  # y is memory of the own slot
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """As above for any size. Data of a slot: W - 1 parts of partial values, then the sums of all
    owners one after the other.

    In rounds: while partial values of round k travel, round k - 1 is summed and sent on, and round
    k - 2 is copied into y; with VIEW the sums stay where they are, and it is waited for alone.
    Flags as in `sum_by_flags_kernel`, and as many again for sums.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
    per_source = num_rounds * programs
    for turn in range(num_rounds + 2):
        if turn < num_rounds:
            index = turn * programs + program
            for block in range(blocks_a_round):
                at = (index.to(tl.int64) * blocks_a_round + block) * BLOCK + tl.arange(0, BLOCK)
                push_partial(x_ptr, data_ptrs, at, share, total, part, RANK, WORLD)
            announce(flag_ptrs, RANK * per_source + index, RANK, WORLD, BLOCK_W)
        if turn > 0 and turn <= num_rounds:
            index = (turn - 1) * programs + program
            poll_peers(
                own_flags, index, per_source, report_ptr, index, RANK, WORLD, BLOCK_W, DEADLINE_NS
            )
            for block in range(blocks_a_round):
                at = (index.to(tl.int64) * blocks_a_round + block) * BLOCK + tl.arange(0, BLOCK)
                sum_and_send(x_ptr, y_ptr, data_ptrs, at, share, total, part, RANK, WORLD)
            sums = (WORLD + RANK) * per_source + index
            announce(flag_ptrs, sums, RANK, WORLD, BLOCK_W)
        if turn > 1:
            index = (turn - 2) * programs + program
            first_flag = WORLD * per_source + index
            poll_peers(
                own_flags, first_flag, per_source, report_ptr, index, RANK, WORLD, BLOCK_W,
                DEADLINE_NS,
            )  # fmt: skip
            if not VIEW:
                for block in range(blocks_a_round):
                    at = (index.to(tl.int64) * blocks_a_round + block) * BLOCK + tl.arange(0, BLOCK)
                    copy_sums(y_ptr, data_ptrs, at, share, total, part, RANK, WORLD)


@triton.jit
def push_partial(
    x_ptr, data_ptrs, at, share, total, part, RANK: tl.constexpr, WORLD: tl.constexpr
) -> None:
    """Elements `at` of every peer's share to that peer."""
    for step in tl.static_range(1, WORLD):
        first, size = share_of(peer_of(step, RANK, WORLD), share, total, True)
        value = tl.load(x_ptr + first + at, mask=at < size, other=0.0)
        to_ptr = memory_of(data_ptrs, peer_of(step, RANK, WORLD), x_ptr.dtype.element_ty)
        to_ptr = part_of(to_ptr, lane_of(RANK, peer_of(step, RANK, WORLD)), part)
        tl.store(to_ptr + at, value, mask=at < size)


@triton.jit
def sum_and_send(
    x_ptr, y_ptr, data_ptrs, at, share, total, part, RANK: tl.constexpr, WORLD: tl.constexpr
) -> None:
    """Sum elements `at` of the own share in rank order, into y and to every peer."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    first, size = share_of(RANK, share, total, True)
    received_ptr = memory_of(data_ptrs, RANK, DTYPE)
    sums = tl.zeros(at.shape, tl.float32)
    for source in tl.static_range(WORLD):
        if source == RANK:
            from_ptr = x_ptr + first
        else:
            from_ptr = part_of(received_ptr, lane_of(source, RANK), part)
        sums += tl.load(from_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    for step in tl.static_range(1, WORLD):
        to_ptr = memory_of(data_ptrs, peer_of(step, RANK, WORLD), DTYPE)
        to_ptr = part_of(to_ptr, WORLD - 1, part) + first
        tl.store(to_ptr + at, sums.to(DTYPE), mask=at < size)
    tl.store(y_ptr + first + at, sums.to(DTYPE), mask=at < size)


@triton.jit
def copy_sums(
    y_ptr, data_ptrs, at, share, total, part, RANK: tl.constexpr, WORLD: tl.constexpr
) -> None:
    """What the peers summed, into y."""
    sums_ptr = memory_of(data_ptrs, RANK, y_ptr.dtype.element_ty)
    sums_ptr = part_of(sums_ptr, WORLD - 1, part)
    for lane in tl.static_range(WORLD - 1):
        first, size = share_of(source_of(lane, RANK), share, total, True)
        value = tl.load(sums_ptr + first + at, mask=at < size)
        tl.store(y_ptr + first + at, value, mask=at < size)
