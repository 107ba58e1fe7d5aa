# ruff: noqa: RUF005, C901 - Triton unpacks no tuples; most branches are taken at compile time
# mypy: disable-error-code="assignment,unreachable,var-annotated"
"""Kernels of the residual sum and the norm behind it: a program has whole rows in registers.

A row is CHUNKS tuples of BLOCK columns: 12288 columns are three of 4096, where one power of two
would leave a quarter of the lanes idle. Forward, bytes an element in 16 bits: read x and the
branch, write the sum and the normalised row, 8 (without a branch 4). Backward: read both gradients
and the sum, write one gradient, 8. Statistics and all arithmetic are fp32; the sum is rounded
before its statistics are taken, as if one kernel had stored it and another read it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    x_ptr,
    branch_ptr,  # None: the sum is x, and is not written
    weight_ptr,
    bias_ptr,  # None: RMSNorm
    sum_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    num_columns,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A row a program."""
    row = tl.program_id(0).to(tl.int64)
    start = row * num_columns
    sums = ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        exists = columns < num_columns
        x = tl.load(x_ptr + start + columns, mask=exists, other=0.0)
        if branch_ptr is not None:
            branch = tl.load(branch_ptr + start + columns, mask=exists, other=0.0)
            x = (x.to(tl.float32) + branch.to(tl.float32)).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + start + columns, x, mask=exists)
        sums = sums + (x,)
    mean = 0.0
    if bias_ptr is not None:
        total = tl.zeros((BLOCK,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            total += sums[chunk].to(tl.float32)
        mean = tl.sum(total, 0) / num_columns
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros((BLOCK,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        exists = chunk * BLOCK + tl.arange(0, BLOCK) < num_columns
        x = tl.where(exists, sums[chunk].to(tl.float32) - mean, 0.0)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / num_columns + EPS)
    tl.store(rstd_ptr + row, rstd)
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        exists = columns < num_columns
        weight = tl.load(weight_ptr + columns, mask=exists, other=0.0).to(tl.float32)
        y = (sums[chunk].to(tl.float32) - mean) * rstd * weight
        if bias_ptr is not None:
            y += tl.load(bias_ptr + columns, mask=exists, other=0.0).to(tl.float32)
        tl.store(y_ptr + start + columns, y.to(y_ptr.dtype.element_ty), mask=exists)


@triton.jit
def norm_backward_kernel(
    sum_ptr,
    weight_ptr,
    grad_y_ptr,
    grad_sum_ptr,  # None: no gradient but that through the norm
    mean_ptr,  # None: RMSNorm
    rstd_ptr,
    grad_ptr,
    weight_partials_ptr,
    bias_partials_ptr,  # None: not summed here
    num_rows,
    num_columns,
    rows_each,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Gradient of the sum, and partial sums [P, D] of the weight's (and bias') gradient.

    With h = (x - mean) rstd and g = grad_y weight, the gradient through the norm is
    rstd (g - mean(g) - h mean(g h)); RMSNorm has neither mean nor the term mean(g).
    """
    program = tl.program_id(0)
    weight_sums = ()
    bias_sums = ()
    for _chunk in tl.static_range(CHUNKS):
        weight_sums = weight_sums + (tl.zeros((BLOCK,), tl.float32),)
        bias_sums = bias_sums + (tl.zeros((BLOCK,), tl.float32),)
    first = program * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        start = tl.cast(row, tl.int64) * num_columns
        rstd = tl.load(rstd_ptr + row)
        mean = 0.0
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row)
        xs = ()
        grads = ()
        for chunk in tl.static_range(CHUNKS):
            columns = chunk * BLOCK + tl.arange(0, BLOCK)
            exists = columns < num_columns
            xs = xs + (tl.load(sum_ptr + start + columns, mask=exists, other=0.0),)
            grads = grads + (tl.load(grad_y_ptr + start + columns, mask=exists, other=0.0),)
        new_weight_sums = ()
        new_bias_sums = ()
        along = tl.zeros((BLOCK,), tl.float32)
        level = tl.zeros((BLOCK,), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            columns = chunk * BLOCK + tl.arange(0, BLOCK)
            grad = grads[chunk].to(tl.float32)  # 0 in columns that do not exist
            h = (xs[chunk].to(tl.float32) - mean) * rstd
            new_weight_sums = new_weight_sums + (weight_sums[chunk] + grad * h,)
            if bias_partials_ptr is not None:
                new_bias_sums = new_bias_sums + (bias_sums[chunk] + grad,)
            weight = tl.load(weight_ptr + columns, mask=columns < num_columns, other=0.0)
            grad *= weight.to(tl.float32)
            along += grad * h
            if mean_ptr is not None:
                level += grad
        weight_sums = new_weight_sums
        if bias_partials_ptr is not None:
            bias_sums = new_bias_sums
        mean_along = tl.sum(along, 0) / num_columns
        mean_level = 0.0
        if mean_ptr is not None:
            mean_level = tl.sum(level, 0) / num_columns
        for chunk in tl.static_range(CHUNKS):
            columns = chunk * BLOCK + tl.arange(0, BLOCK)
            exists = columns < num_columns
            h = (xs[chunk].to(tl.float32) - mean) * rstd
            weight = tl.load(weight_ptr + columns, mask=exists, other=0.0).to(tl.float32)
            grad = (grads[chunk].to(tl.float32) * weight - mean_level - h * mean_along) * rstd
            if grad_sum_ptr is not None:
                grad += tl.load(grad_sum_ptr + start + columns, mask=exists, other=0.0).to(
                    tl.float32
                )
            tl.store(grad_ptr + start + columns, grad.to(grad_ptr.dtype.element_ty), mask=exists)
    out = program.to(tl.int64) * num_columns
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * BLOCK + tl.arange(0, BLOCK)
        exists = columns < num_columns
        tl.store(weight_partials_ptr + out + columns, weight_sums[chunk], mask=exists)
        if bias_partials_ptr is not None:
            tl.store(bias_partials_ptr + out + columns, bias_sums[chunk], mask=exists)
