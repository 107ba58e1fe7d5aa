"""Flags between GPUs, as device functions of Triton and Gluon kernels.

A flag is one int32 word in symmetric memory: 0 at rest, 1 when what it announces may be read. The
producer sets it with release semantics at system scope; the one consumer spins with acquire
semantics and clears it. Why words are cleared and not counted: `arena.py`.

Triton has no load with acquire semantics at system scope, so the wait is a line of PTX; the
interpreter takes an atomic addition of zero instead. A spin costs one L2 read a round, by the
waiting program alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def set_flag(ptr):
    """Publish what this program has written. After stores by several threads: barrier first."""
    tl.atomic_xchg(ptr, 1, sem="release", scope="sys")


@triton.jit
def clear_flag(ptr):
    """Put a flag that was waited for back to rest."""
    tl.store(ptr, 0)


@triton.jit
def read_flag(ptr):
    """The word, and everything its writer had written before it."""
    if INTERPRETED:
        return tl.atomic_add(ptr, 0, sem="acquire", scope="sys")
    else:  # noqa: RET505 - a branch at compile time: Triton refuses two returns without it
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [ptr],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def nanoseconds():
    """The device's global timer; ticks about once a microsecond."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def wait_flag(ptr, report_ptr, source, tile, DEADLINE_NS: tl.constexpr):
    """Spin until the flag is set. It stays set.

    With a deadline (debug mode) a wait that runs out writes (1, source, tile) to `report_ptr`,
    which is host memory and survives, and ends the kernel by a trap.
    """
    value = read_flag(ptr)
    if DEADLINE_NS == 0 or INTERPRETED:
        while value == 0:
            value = read_flag(ptr)
    else:
        start = nanoseconds()
        while value == 0:
            value = read_flag(ptr)
            if nanoseconds() - start > DEADLINE_NS:
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
def barrier_kernel(count_ptrs, report_ptr, rank, WORLD: tl.constexpr, DEADLINE_NS: tl.constexpr):
    """Every rank has arrived. Rank r's word [r] counts its own arrivals, word [s] those of rank s.

    Counted, unlike flags: a barrier has no buffer whose turns would order two of them. One program.
    """
    own = tl.load(count_ptrs + rank).to(tl.pointer_type(tl.int32))
    arrival = tl.load(own + rank) + 1
    tl.store(own + rank, arrival)
    for peer in tl.static_range(WORLD):
        if peer != rank:
            there = tl.load(count_ptrs + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(there + rank, arrival, sem="release", scope="sys")
    for peer in tl.static_range(WORLD):
        if peer != rank:
            seen = read_flag(own + peer)
            if DEADLINE_NS == 0 or INTERPRETED:
                while seen - arrival < 0:
                    seen = read_flag(own + peer)
            else:
                start = nanoseconds()
                while seen - arrival < 0:
                    seen = read_flag(own + peer)
                    if nanoseconds() - start > DEADLINE_NS:
                        tl.store(report_ptr + 1, tl.cast(peer, tl.int64))
                        tl.store(report_ptr + 2, tl.cast(-1, tl.int64))
                        tl.store(report_ptr, tl.cast(1, tl.int64))
                        tl.inline_asm_elementwise(
                            "fence.sc.sys; trap; mov.u32 $0, 0;",
                            "=r",
                            [],
                            tl.int32,
                            is_pure=False,
                            pack=1,
                        )
