"""Triton kernels of an optimizer step: each value of the state is read once and written once.

Bytes an element: squares 4 (grad); AdamW 16 read (grad, m, v, master), 12 written and 2 for the
bf16 parameter; LAMB's update 16 and 12 (the update replaces the gradient), its application 8 and 6.

`scalars_ptr` holds what a step decides on the device (`kernel_updates.py`), so that no launch waits
for it:
    0 keep      0 where the step is masked: nothing is written, all bits stay
    1 scale     of the gradients: 1 / tokens and clipping
    2 lr
    3 1 / (1 - beta1^t)
    4 1 / sqrt(1 - beta2^t)
Maths is fp32, with the betas' complements and everything above computed in fp64. Sums of squares
are fp64, which an H200 does beside the loads (the sum reads 4 bytes an element); each lane adds its
own elements in order, lanes are joined in a fixed tree, tiles by `sum_tiles_kernel` likewise: equal
bits in each run.

Tiles (`tiles.py`) are rows of four int64: first element, number of elements, slot of the sums (-1:
not counted), place of the logical name. A tile never crosses a segment.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS: tl.constexpr = tl.constexpr(4)  # of a row of the table of tiles


@triton.jit
def adam_direction(
    grad, m, v, scalars_ptr, BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr
):
    """(m, v, m_hat / (sqrt(v_hat) + eps)) after this gradient."""
    grad *= tl.load(scalars_ptr + 1)
    m = BETA1 * m + (1 - BETA1) * grad
    v = BETA2 * v + (1 - BETA2) * (grad * grad)
    denominator = tl.sqrt_rn(v) * tl.load(scalars_ptr + 4) + EPS
    return m, v, tl.div_rn(m * tl.load(scalars_ptr + 3), denominator)


@triton.jit
def adamw_kernel(
    master_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    parameters_ptr,  # None where the master is the parameter
    scalars_ptr,
    size,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of AdamW: w -= lr decay w; w -= lr m_hat / (sqrt(v_hat) + eps)."""
    if tl.load(scalars_ptr) != 0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        m = tl.load(m_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        v = tl.load(v_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        w = tl.load(master_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        lr = tl.load(scalars_ptr + 2)
        m, v, direction = adam_direction(grad, m, v, scalars_ptr, BETA1, BETA2, EPS)
        if DECAY != 0.0:
            w -= lr * DECAY * w
        w -= lr * direction
        tl.store(m_ptr + at, m, mask=inside, eviction_policy="evict_first")
        tl.store(v_ptr + at, v, mask=inside, eviction_policy="evict_first")
        tl.store(master_ptr + at, w, mask=inside, eviction_policy="evict_first")
        if parameters_ptr is not None:
            tl.store(parameters_ptr + at, w, mask=inside)


@triton.jit
def tile_of(tiles_ptr, ALIGNED: tl.constexpr):
    """(first element, number of elements, slot, place of the name) of this program's tile.

    ALIGNED: 16 divides where every tile begins, so that the compiler may load 16 bytes at a time.
    """
    row = tiles_ptr + tl.program_id(0) * COLUMNS
    first = tl.load(row)
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first, tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def squares_kernel(
    x_ptr,
    tiles_ptr,
    sums_ptr,  # fp64 [slots]
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of squares of a tile."""
    first, size, slot, _name = tile_of(tiles_ptr, ALIGNED)
    if slot >= 0:
        lanes = tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float64)
        whole = size // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            x = tl.load(x_ptr + first + start + lanes).to(tl.float64)
            total += x * x
        x = tl.load(x_ptr + first + whole + lanes, mask=whole + lanes < size, other=0.0)
        total += x.to(tl.float64) * x.to(tl.float64)
        tl.store(sums_ptr + slot, tl.sum(total))


@triton.jit
def sum_tiles_kernel(
    sums_ptr,  # fp64 [rows, slots]
    bounds_ptr,  # int64 [names + 1]: the slots of name i are bounds[i] to bounds[i + 1]
    out_ptr,  # fp64 [rows, names]
    slots,
    names,
    BLOCK: tl.constexpr,
):
    """The sum over the tiles of one name, in one row; program row * names + name."""
    row = tl.program_id(0) // names
    name = tl.program_id(0) % names
    first = tl.load(bounds_ptr + name)
    last = tl.load(bounds_ptr + name + 1)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        at = start + lanes
        total += tl.load(sums_ptr + row * slots + at, mask=at < last, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def lamb_update_block(
    master_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    scalars_ptr,
    at,
    inside,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
):
    """(w, u) as fp64 where `inside`, else 0, after u has taken the gradient's place."""
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0)
    m = tl.load(m_ptr + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + at, mask=inside, other=0.0)
    w = tl.load(master_ptr + at, mask=inside, other=0.0)
    m, v, update = adam_direction(grad, m, v, scalars_ptr, BETA1, BETA2, EPS)
    update += DECAY * w
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    tl.store(grad_ptr + at, update, mask=inside)
    return w.to(tl.float64), update.to(tl.float64)


@triton.jit
def lamb_update_kernel(
    master_ptr,
    grad_ptr,
    m_ptr,
    v_ptr,
    scalars_ptr,
    tiles_ptr,
    sums_ptr,  # fp64 [2, slots]: of the masters, of the updates
    slots,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    DECAY: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of u = m_hat / (sqrt(v_hat) + eps) + decay w, and the sums of squares of w and u."""
    if tl.load(scalars_ptr) != 0:
        first, size, slot, _name = tile_of(tiles_ptr, ALIGNED)
        lanes = tl.arange(0, BLOCK)
        w_squares = tl.zeros([BLOCK], tl.float64)
        u_squares = tl.zeros([BLOCK], tl.float64)
        whole = size // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            w, u = lamb_update_block(
                master_ptr,
                grad_ptr,
                m_ptr,
                v_ptr,
                scalars_ptr,
                first + start + lanes,
                tl.full([BLOCK], True, tl.int1),
                BETA1,
                BETA2,
                EPS,
                DECAY,
            )
            w_squares += w * w
            u_squares += u * u
        if whole < size:
            w, u = lamb_update_block(
                master_ptr,
                grad_ptr,
                m_ptr,
                v_ptr,
                scalars_ptr,
                first + whole + lanes,
                whole + lanes < size,
                BETA1,
                BETA2,
                EPS,
                DECAY,
            )
            w_squares += w * w
            u_squares += u * u
        if slot >= 0:
            tl.store(sums_ptr + slot, tl.sum(w_squares))
            tl.store(sums_ptr + slots + slot, tl.sum(u_squares))


@triton.jit
def lamb_apply_kernel(
    master_ptr,
    update_ptr,
    parameters_ptr,  # None where the master is the parameter
    scalars_ptr,
    tiles_ptr,
    ratios_ptr,  # fp32 [names]
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of w -= lr * ratio * u."""
    if tl.load(scalars_ptr) != 0:
        first, size, _slot, name = tile_of(tiles_ptr, ALIGNED)
        rate = tl.load(scalars_ptr + 2) * tl.load(ratios_ptr + name)
        lanes = tl.arange(0, BLOCK)
        whole = size // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            at = first + start + lanes
            w = tl.load(master_ptr + at) - rate * tl.load(update_ptr + at)
            tl.store(master_ptr + at, w)
            if parameters_ptr is not None:
                tl.store(parameters_ptr + at, w)
        at = first + whole + lanes
        inside = whole + lanes < size
        update = tl.load(update_ptr + at, mask=inside, other=0.0)
        w = tl.load(master_ptr + at, mask=inside, other=0.0) - rate * update
        tl.store(master_ptr + at, w, mask=inside)
        if parameters_ptr is not None:
            tl.store(parameters_ptr + at, w, mask=inside)
