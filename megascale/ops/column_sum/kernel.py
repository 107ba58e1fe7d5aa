"""Kernels of column sums.

A program owns COLUMNS columns and `rows_each` rows, in tiles [ROWS, COLUMNS] whose elements it adds
up lane by lane in fp32; the tile is reduced over its rows once, at the end. Bytes: the matrix is
read once, the partial sums (1 / rows_each of it, in fp32) are written and read.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def column_sums_kernel(
    x_ptr,
    partials_ptr,
    num_rows,
    num_columns,
    row_stride,
    rows_each,
    num_blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """partials[split, column] = sum of the split's rows. Programs: num_blocks x splits."""
    program = tl.program_id(0)
    split = program // num_blocks
    columns = (program % num_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < num_columns
    first = split * rows_each
    last = tl.minimum(first + rows_each, num_rows)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & exists[None, :]
        at = rows.to(tl.int64)[:, None] * row_stride + columns[None, :]
        sums += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    store_partial(partials_ptr, sums, split, columns, num_columns)


@triton.jit
def store_partial(partials_ptr, sums, split, columns, num_columns):
    """Reduce a program's tile over its rows into row `split` of the partial sums [P, columns]."""
    at = split.to(tl.int64) * num_columns + columns
    tl.store(partials_ptr + at, tl.sum(sums, 0), mask=columns < num_columns)


@triton.jit
def add_partials_kernel(
    partials_ptr,
    out_ptr,
    num_partials,
    num_columns,
    OVERWRITE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out[column] (+)= sum of its partial sums, in their order by tiles. A program a block."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < num_columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(0, num_partials, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < num_partials)[:, None] & exists[None, :]
        at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        sums += tl.load(partials_ptr + at, mask=inside, other=0.0)
    total = tl.sum(sums, 0)
    if not OVERWRITE:
        total += tl.load(out_ptr + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, total.to(out_ptr.dtype.element_ty), mask=exists)
