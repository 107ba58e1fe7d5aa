"""A kernel that pushes a row to every peer and waits for theirs, to test the shared arena."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from megascale.flux.signals import clear_flag, set_flag, wait_flag


@triton.jit
def exchange_kernel(
    x_ptr: Any,
    out_ptr: Any,
    data_ptrs: Any,
    flag_ptrs: Any,
    report_ptr: Any,
    rank: Any,
    WORLD: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """out [WORLD, SIZE] = x [SIZE] of every rank, in fp32."""
    columns = tl.arange(0, SIZE)
    row = tl.load(x_ptr + columns)
    for peer in tl.static_range(WORLD):
        slab = tl.load(data_ptrs + peer).to(tl.pointer_type(tl.float32))
        tl.store(slab + rank * SIZE + columns, row)
        set_flag(tl.load(flag_ptrs + peer).to(tl.pointer_type(tl.int32)) + rank)
    slab = tl.load(data_ptrs + rank).to(tl.pointer_type(tl.float32))
    flags = tl.load(flag_ptrs + rank).to(tl.pointer_type(tl.int32))
    for source in tl.static_range(WORLD):
        wait_flag(flags + source, report_ptr, source, 0, 0)
        clear_flag(flags + source)
        tl.store(out_ptr + source * SIZE + columns, tl.load(slab + source * SIZE + columns))
