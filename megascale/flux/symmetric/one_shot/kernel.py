"""Sums over ranks in one hop: one-shot all-reduce, and reduce-scatter.

Each program owns the same piece of every part on all ranks. It pushes its piece to whoever needs
it, and waits for the same piece of all others; nothing else, so equal grids cannot deadlock, in
whatever order their programs run. Two ways to announce a piece (`symmetric/kernel.py`): in band for
few bytes, flags for any number.

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
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
    DEADLINE_NS: tl.constexpr,
):
    """y = the sum over ranks of the own share of x. One block a program.

    A rank without a share receives no words; the first program tells it that the call has begun
    (`arena.py`: a call completes only after every peer has begun it).
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORD: tl.constexpr = word_of(DTYPE)
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    first, size = share_of(RANK, share, total, SCATTER)
    push_in_band(x_ptr, flag_ptrs, at, share, total, part, RANK, WORLD, SCATTER)
    if SCATTER:
        greet_the_idle(flag_ptrs, report_ptr, share, total, RANK, WORLD, DEADLINE_NS)
    own = tl.load(x_ptr + first + at, mask=at < size, other=0.0).to(tl.float32)
    words_ptr = memory_of(flag_ptrs, RANK, WORD)
    tl.debug_barrier()  # the pushes leave before the first look for an answer
    y = sum_in_band(
        own, words_ptr, at, at < size, part, report_ptr, program, RANK, WORLD, DTYPE, DEADLINE_NS
    )
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
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    own_flags = tl.load(flag_ptrs + RANK).to(tl.pointer_type(tl.int32))
    received_ptr = memory_of(data_ptrs, RANK, DTYPE)
    own_first, own_size = share_of(RANK, share, total, SCATTER)
    for turn in range(num_rounds + 1):
        if turn < num_rounds:
            piece = (turn * programs + program).to(tl.int64) * blocks_a_round
            for block in range(blocks_a_round):
                at = (piece + block) * BLOCK + tl.arange(0, BLOCK)
                value = tl.load(x_ptr + at, mask=at < total, other=0.0)
                for step in tl.static_range(1, WORLD):
                    first, size = share_of(peer_of(step, RANK, WORLD), share, total, SCATTER)
                    if SCATTER:
                        value = tl.load(x_ptr + first + at, mask=at < size, other=0.0)
                    to_ptr = memory_of(data_ptrs, peer_of(step, RANK, WORLD), DTYPE)
                    to_ptr = part_of(to_ptr, lane_of(RANK, peer_of(step, RANK, WORLD)), part)
                    tl.store(to_ptr + at, value, mask=at < size)
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
                total_B = tl.zeros((BLOCK,), tl.float32)
                for source in tl.static_range(WORLD):
                    if source == RANK:
                        from_ptr = x_ptr + own_first
                    else:
                        from_ptr = part_of(received_ptr, lane_of(source, RANK), part)
                    total_B += tl.load(from_ptr + at, mask=at < own_size, other=0.0).to(tl.float32)
                tl.store(y_ptr + at, total_B.to(DTYPE), mask=at < own_size)
