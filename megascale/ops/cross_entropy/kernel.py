"""Kernels of the cross-entropy: statistics of a row, and the gradient over the logits.

Bytes an element, in 16 bits: 2 forward, 4 backward. One exponential an element each way: a block's
maximum is taken before its exponentials, and the sum so far is rescaled by one factor a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_statistics_kernel(
    logits_ptr,
    labels_ptr,
    statistics_ptr,
    num_rows,
    row_stride,
    num_valid,
    vocab_start,
    BLOCK: tl.constexpr,
):
    """statistics [3, T]: maximum, sum of exp(logit - maximum), the label's logit. A row a program.

    Lanes keep sums of their own, joined at the end. A row of minus infinities has the sum 0.
    """
    row = tl.program_id(0)
    logits = logits_ptr + row.to(tl.int64) * row_stride
    label = tl.load(labels_ptr + row) - vocab_start
    is_here = (label >= 0) & (label < num_valid)
    target = tl.load(logits + label, mask=is_here, other=0.0).to(tl.float32)
    top = tl.full((), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_valid, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < num_valid, other=float("-inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        sums = sums * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    tl.store(statistics_ptr + row, top)
    tl.store(statistics_ptr + num_rows + row, tl.sum(sums, 0))
    tl.store(statistics_ptr + 2 * num_rows + row, target)


@triton.jit
def gradient_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    scale_ptr,
    num_columns,
    row_stride,
    num_valid,
    vocab_start,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """logits = (exp(logits - lse) - [column is the label's]) scale, 0 from num_valid on."""
    program = tl.program_id(0)
    row = program // num_blocks
    columns = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < num_columns
    at = logits_ptr + row.to(tl.int64) * row_stride + columns
    label = tl.load(labels_ptr + row) - vocab_start
    x = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    gradient = tl.exp(x - tl.load(lse_ptr + row)) - tl.where(columns == label, 1.0, 0.0)
    gradient = tl.where(columns < num_valid, gradient * tl.load(scale_ptr + row), 0.0)
    tl.store(at, gradient.to(logits_ptr.dtype.element_ty), mask=exists)
