"""Sums over ranks in one hop: one-shot all-reduce, and reduce-scatter.

In band and by flags (`symmetric/kernel.py`) each program owns the same pieces of every part on all
ranks. It pushes its pieces to whoever needs them, and waits for the same pieces of all others;
nothing else, so equal grids of resident programs cannot deadlock.

By roles, a third way, some programs only push, with flags, and the others only sum. A link is full
from 8 pushing programs on, so it never waits for a sum, and what is left to do when the last bytes
have come is the sum of those alone. Where every program does both, the sums of all of them stand
behind the pushes of all of them: 7 us of the 45 that an all-reduce of 12.6 MB took on two ranks
[calc]. Pushers wait for nobody and come first in the grid.

Reduce-scatter is the one-shot all-reduce in which every peer gets another part of x: SCATTER.

Legend: elements are counted flat. Destination d receives elements [d * share, (d + 1) * share) of
the `total` elements of x with SCATTER, and all of them without (share = total there).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.flux.signals import clear_flag, set_flag, wait_flag
from megascale.flux.symmetric.kernel import (
    announce,
    clear_band,
    lane_of,
    memory_of,
    nonzero,
    part_of,
    peer_lanes,
    peer_of,
    poll_peers,
    sum_in_band,
    word_of,
)


@triton.jit
def share_of(destination, share, total, SCATTER: tl.constexpr):
    """(first element, number of elements) of what a rank receives."""
    if SCATTER:
        first = destination * tl.cast(share, tl.int64)
        return first, tl.minimum(tl.maximum(total - first, 0), share)
    else:  # noqa: RET505 - a branch at compile time: Triton refuses two returns without it
        return tl.cast(0, tl.int64), tl.cast(total, tl.int64)


@triton.jit
def push_in_band(
    x_ptr,
    flag_ptrs,
    at,
    share,
    total,
    part,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SCATTER: tl.constexpr,
) -> None:
    """Elements `at` of every destination's share into its words, in the own lane's part."""
    WORD: tl.constexpr = word_of(x_ptr.dtype.element_ty)
    value = tl.load(x_ptr + at, mask=at < total, other=0.0)
    for step in tl.static_range(1, WORLD):
        first, size = share_of(peer_of(step, RANK, WORLD), share, total, SCATTER)
        if SCATTER:
            value = tl.load(x_ptr + first + at, mask=at < size, other=0.0)
        words_ptr = memory_of(flag_ptrs, peer_of(step, RANK, WORLD), WORD)
        words_ptr = part_of(words_ptr, lane_of(RANK, peer_of(step, RANK, WORLD)), part)
        tl.store(words_ptr + at, nonzero(value), mask=at < size)


@triton.jit
def sum_in_band_kernel(
    x_ptr,
    y_ptr,
    flag_ptrs,  # int64 [W]
    report_ptr,
    share,
    total,
    part,  # words between sources; 16 divides it
    blocks,  # of a program
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """y = the sum over ranks of the own share of x.

    A rank without a share receives no words; the first program tells it that the call has begun
    (`arena.py`: a call completes only after every peer has begun it).
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORD: tl.constexpr = word_of(DTYPE)
    program, programs = tl.program_id(0), tl.num_programs(0)
    first, size = share_of(RANK, share, total, SCATTER)
    for block in range(blocks):
        at = (block * programs + program) * BLOCK + tl.arange(0, BLOCK)
        push_in_band(x_ptr, flag_ptrs, at, share, total, part, RANK, WORLD, SCATTER)
    if SCATTER:
        greet_the_idle(flag_ptrs, report_ptr, share, total, RANK, WORLD, DEADLINE_NS)
    words_ptr = memory_of(flag_ptrs, RANK, WORD)
    tl.debug_barrier()  # the pushes leave before the first look for an answer
    for block in range(blocks):
        at = (block * programs + program) * BLOCK + tl.arange(0, BLOCK)
        own = tl.load(x_ptr + first + at, mask=at < size, other=0.0).to(tl.float32)
        y = sum_in_band(
            own, words_ptr, at, at < size, part, report_ptr, program, RANK, WORLD, DTYPE,
            DEADLINE_NS,
        )  # fmt: skip
        tl.store(y_ptr + at, y.to(DTYPE), mask=at < size)
        clear_band(words_ptr, at, at < size, part, WORLD)


@triton.jit
def greet_the_idle(
    flag_ptrs,
    report_ptr,
    share,
    total,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
) -> None:
    """Program 0 sets a flag at every rank that receives nothing, or waits for them if it is one."""
    if tl.program_id(0) == 0:
        for peer in tl.static_range(WORLD):
            _, size = share_of(peer, share, total, True)
            if size == 0:
                set_flag(tl.load(flag_ptrs + peer).to(tl.pointer_type(tl.int32)) + RANK)
        _, size = share_of(RANK, share, total, True)
        if size == 0:
            own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
            for source in tl.static_range(WORLD):
                wait_flag(own_flags + source, report_ptr, source, 0, DEADLINE_NS)
                clear_flag(own_flags + source)


@triton.jit
def push_block(
    x_ptr,
    data_ptrs,
    at,
    share,
    total,
    part,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SCATTER: tl.constexpr,
) -> None:
    """Elements `at` of every destination's share into its slot, in the own lane's part."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    value = tl.load(x_ptr + at, mask=at < total, other=0.0)
    for step in tl.static_range(1, WORLD):
        first, size = share_of(peer_of(step, RANK, WORLD), share, total, SCATTER)
        if SCATTER:
            value = tl.load(x_ptr + first + at, mask=at < size, other=0.0)
        to_ptr = memory_of(data_ptrs, peer_of(step, RANK, WORLD), DTYPE)
        to_ptr = part_of(to_ptr, lane_of(RANK, peer_of(step, RANK, WORLD)), part)
        tl.store(to_ptr + at, value, mask=at < size)


@triton.jit
def sum_block(
    x_ptr,
    y_ptr,
    received_ptr,  # the own slot's data
    at,
    share,
    total,
    part,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SCATTER: tl.constexpr,
) -> None:
    """y = elements `at` of the own share, which have come from everybody, in rank order in fp32."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    first, size = share_of(RANK, share, total, SCATTER)
    sums = tl.zeros(at.shape, tl.float32)
    for source in tl.static_range(WORLD):
        if source == RANK:
            from_ptr = x_ptr + first
        else:
            from_ptr = part_of(received_ptr, lane_of(source, RANK), part)
        sums += tl.load(from_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, sums.to(DTYPE), mask=at < size)


@triton.jit
def sum_by_flags_kernel(
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
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """As `sum_in_band_kernel`, for any size: pieces through the slot's data, a flag a piece.

    In rounds: a program pushes its piece of round k + 1 before it waits for that of round k, so
    that the sum of what has come runs beside the transfer of what follows.
    Flag of (source, round, program): (source * rounds + round) * programs + program.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
    received_ptr = memory_of(data_ptrs, RANK, x_ptr.dtype.element_ty)
    for turn in range(num_rounds + 1):
        if turn < num_rounds:
            piece = (turn * programs + program).to(tl.int64) * blocks_a_round
            for block in range(blocks_a_round):
                at = (piece + block) * BLOCK + tl.arange(0, BLOCK)
                push_block(x_ptr, data_ptrs, at, share, total, part, RANK, WORLD, SCATTER)
            announce(
                flag_ptrs, (RANK * num_rounds + turn) * programs + program, RANK, WORLD, BLOCK_W
            )
        if turn > 0:
            index = (turn - 1) * programs + program
            poll_peers(
                own_flags,
                index,
                num_rounds * programs,
                report_ptr,
                index,
                RANK,
                WORLD,
                BLOCK_W,
                DEADLINE_NS,
            )
            piece = index.to(tl.int64) * blocks_a_round
            for block in range(blocks_a_round):
                at = (piece + block) * BLOCK + tl.arange(0, BLOCK)
                sum_block(x_ptr, y_ptr, received_ptr, at, share, total, part, RANK, WORLD, SCATTER)


@triton.jit
def sum_by_roles_kernel(
    x_ptr,
    y_ptr,
    data_ptrs,  # int64 [W]
    flag_ptrs,  # int64 [W]
    report_ptr,
    share,
    total,
    part,  # elements between sources; 16 divides it
    num_blocks,
    pushers,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # that are pushed before their flags are set
    BLOCK_W: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """As `sum_by_flags_kernel`; the first `pushers` programs push and the others sum.

    Flag of (source, block): source * num_blocks + block. Pushers take blocks in the order in which
    they are summed.
    """
    program = tl.program_id(0)
    if program < pushers:
        for piece in range(program, tl.cdiv(num_blocks, BLOCKS), pushers):
            for block in tl.static_range(BLOCKS):
                at = (tl.cast(piece, tl.int64) * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)
                push_block(x_ptr, data_ptrs, at, share, total, part, RANK, WORLD, SCATTER)
            announce_blocks(
                flag_ptrs, RANK * num_blocks, piece * BLOCKS, num_blocks,
                RANK, WORLD, BLOCKS, BLOCK_W,
            )  # fmt: skip
    else:
        own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
        received_ptr = memory_of(data_ptrs, RANK, x_ptr.dtype.element_ty)
        for block in range(program - pushers, num_blocks, tl.num_programs(0) - pushers):
            poll_peers(
                own_flags, block, num_blocks, report_ptr, block, RANK, WORLD, BLOCK_W, DEADLINE_NS
            )
            at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            sum_block(x_ptr, y_ptr, received_ptr, at, share, total, part, RANK, WORLD, SCATTER)


@triton.jit
def announce_blocks(
    flag_ptrs,
    base,
    first,
    num_blocks,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Set the flags of blocks first to first + BLOCKS at every peer, behind what was written."""
    peer, there = peer_lanes(RANK, WORLD, BLOCK_W)
    block = first + tl.arange(0, BLOCKS)
    flags = tl.load(flag_ptrs + peer).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    tl.atomic_xchg(
        flags[:, None] + (base + block)[None, :],
        1,
        mask=there[:, None] & (block < num_blocks)[None, :],
        sem="release",
        scope="sys",
    )
