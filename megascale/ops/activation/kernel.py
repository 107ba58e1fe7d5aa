"""Kernels of the activation with the bias before it. fp32 inside; ACT is the activation's name.

Bytes an element of x, in 16 bits: forward 4 (swiglu 3), backward 6 (swiglu 5), each read or written
once, beside the bias. The sigmoid form of GELU's tanh approximation, x sigmoid(2u), is the same
function with one exponential: 0.5 (1 + tanh u) = sigmoid(2u).
"""

from __future__ import annotations

import triton
import triton.language as tl

from megascale.ops.column_sum.kernel import store_partial

_TANH_SCALE: tl.constexpr = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)
_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_DENSITY: tl.constexpr = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


@triton.jit
def _gelu(x, ACT: tl.constexpr):
    if ACT == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * _SQRT_HALF)
    else:
        share = tl.sigmoid(_TANH_SCALE * (x + _CUBIC * x * x * x))
    return x * share


@triton.jit
def _gelu_slope(x, ACT: tl.constexpr):
    if ACT == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * _SQRT_HALF)
        slope = share + x * (_DENSITY * tl.exp(-0.5 * x * x))
    else:
        share = tl.sigmoid(_TANH_SCALE * (x + _CUBIC * x * x * x))
        slope = share + x * share * (1.0 - share) * (_TANH_SCALE * (1.0 + 3.0 * _CUBIC * x * x))
    return slope


@triton.jit
def _biased(x_ptr, at, inside, bias_ptr, columns, exists):
    """fp32 x + bias of a tile; without a bias its pointer is None."""
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=exists, other=0.0).to(tl.float32)
        x += bias[None, :]
    return x


@triton.jit
def activation_kernel(
    x_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_columns,
    row_stride,
    num_blocks,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of y [rows, columns]. Programs: num_blocks x tiles of rows."""
    program = tl.program_id(0)
    columns = (program % num_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    rows = (program // num_blocks) * ROWS + tl.arange(0, ROWS)
    exists = columns < num_columns
    inside = (rows < num_rows)[:, None] & exists[None, :]
    far = rows.to(tl.int64)[:, None]
    at = far * row_stride + columns[None, :]
    if ACT == "swiglu":
        gate = _biased(x_ptr, at, inside, bias_ptr, columns, exists)
        up = _biased(x_ptr, at + num_columns, inside, bias_ptr, columns + num_columns, exists)
        y = gate * tl.sigmoid(gate) * up
    else:
        y = _gelu(_biased(x_ptr, at, inside, bias_ptr, columns, exists), ACT)
    out = y_ptr + far * num_columns + columns[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward_kernel(
    x_ptr,
    bias_ptr,
    grad_ptr,
    grad_x_ptr,
    partials_ptr,
    num_rows,
    num_columns,
    row_stride,
    grad_row_stride,
    grad_x_row_stride,
    rows_each,
    num_blocks,
    ACT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradient of x, for columns of the result; partials [P, F] None: no sums of it over rows."""
    program = tl.program_id(0)
    split = program // num_blocks
    columns = (program % num_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < num_columns
    first = split * rows_each
    last = tl.minimum(first + rows_each, num_rows)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for row in range(first, last, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & exists[None, :]
        far = rows.to(tl.int64)[:, None]
        at = far * row_stride + columns[None, :]
        out = grad_x_ptr + far * grad_x_row_stride + columns[None, :]
        grad = tl.load(
            grad_ptr + far * grad_row_stride + columns[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        if ACT == "swiglu":
            gate = _biased(x_ptr, at, inside, bias_ptr, columns, exists)
            up = _biased(x_ptr, at + num_columns, inside, bias_ptr, columns + num_columns, exists)
            share = tl.sigmoid(gate)
            grad_up = (grad * gate * share).to(grad_x_ptr.dtype.element_ty)
            tl.store(out + num_columns, grad_up, mask=inside)
            slope = up * share * (1.0 + gate * (1.0 - share))
            if partials_ptr is not None:
                up_sums += tl.where(inside, grad_up.to(tl.float32), 0.0)
        else:
            slope = _gelu_slope(_biased(x_ptr, at, inside, bias_ptr, columns, exists), ACT)
        grad_x = (grad * slope).to(grad_x_ptr.dtype.element_ty)
        tl.store(out, grad_x, mask=inside)
        if partials_ptr is not None:
            sums += tl.where(inside, grad_x.to(tl.float32), 0.0)
    if partials_ptr is not None:
        if ACT == "swiglu":
            width = 2 * num_columns
            _store_half(partials_ptr, sums, split, columns, exists, width)
            _store_half(partials_ptr, up_sums, split, columns + num_columns, exists, width)
        else:
            store_partial(partials_ptr, sums, split, columns, num_columns)


@triton.jit
def _store_half(partials_ptr, sums, split, columns, exists, width):
    at = split.to(tl.int64) * width + columns
    tl.store(partials_ptr + at, tl.sum(sums, 0), mask=exists)
