"""Counter-based randomness: every number is a pure function of (key, counters), on any device.

SplitMix64 (Steele, Lea, Flood 2014) in wrapping 64-bit integer arithmetic. There is no generator
state: a weight's initial value depends on (seed, logical name, its global index), a dropout mask on
(seed, site, global token number, column). So both are the same in every parallel layout, masks are
the same when recomputed, and a resumed run needs nothing but its position.

Two-level use: `row_keys = bits(key, rows)`, then `bits(row_keys, columns)`. One level over a flat
index would walk one sequence of 2^64 numbers from many starts, and long streams would overlap.

Cost of dropout: no mask is kept; the backward pass recomputes it (about ten integer operations an
element, fused with the multiplication on CUDA; on CPU about ten passes).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megascale.ops.cached import cached
from megascale.ops.compiled import compiled_on_cuda
from megascale.ops.mode import OperatorMode
from megascale.shards import Box

_SLICE_ELEMENTS = 1 << 24  # int64 and fp64 temporaries stay below about 1 GB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(z: Tensor, num_bits: int) -> Tensor:
    """Logical shift; torch's `>>` on int64 copies the sign."""
    return (z >> num_bits) & ((1 << (64 - num_bits)) - 1)


def bits(key: int | Tensor, counters: Tensor) -> Tensor:
    """64 random bits (as int64) for each int64 counter; `key` broadcasts."""
    return _mix(counters * _GOLDEN + key)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function: every input bit changes half of the output bits."""
    z = (z ^ _shift_right(z, 30)) * _MULTIPLIER_1
    z = (z ^ _shift_right(z, 27)) * _MULTIPLIER_2
    return z ^ _shift_right(z, 31)


def stream_key(seed: int, name: str) -> int:
    """The key of an independent stream: 64 bits of a hash of seed and name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(key: int | Tensor, counters: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Uniform numbers in [0, 1): 53 bits in fp64, else 24."""
    num_bits = 53 if dtype == torch.float64 else 24
    return _shift_right(bits(key, counters), 64 - num_bits).to(dtype) * 2.0**-num_bits


def normal(key: int | Tensor, counters: Tensor) -> Tensor:
    """Standard normal numbers in fp64, one Box-Muller cosine each; at most 6.8 in magnitude."""
    z = bits(key, counters)
    radius_uniform = (_shift_right(z, 32).double() + 0.5) * 2.0**-32
    angle_uniform = (z & 0xFFFFFFFF).double() * 2.0**-32
    return torch.sqrt(-2.0 * torch.log(radius_uniform)) * torch.cos(2.0 * math.pi * angle_uniform)


def fill_normal_(
    view: Tensor, seed: int, name: str, box: Box, global_shape: tuple[int, ...], std: float
) -> None:
    """Fill `view` with the part `box` of the parameter `name`; any box gives the same elements."""
    assert tuple(view.shape) == box.shape, (name, view.shape, box)
    assert len(box.shape) == len(global_shape) <= 2, (name, box, global_shape)
    key = stream_key(seed, name)
    if len(box.shape) == 1:  # a vector is one row
        view, row0, col0 = view.unsqueeze(0), 0, box.offset[0]
    else:
        row0, col0 = box.offset
    cols = torch.arange(view.shape[1], device=view.device) + col0
    for rows in _row_slices(view):
        row_ids = torch.arange(rows.start, rows.stop, device=view.device) + row0
        view[rows] = normal(bits(key, row_ids)[:, None], cols).mul_(std).to(view.dtype)


def _row_slices(view: Tensor) -> Iterator[slice]:
    """Ranges of rows of bounded size, so that temporaries do not grow with the matrix."""
    rows_each = max(1, _SLICE_ELEMENTS // max(1, view.shape[1]))
    for start in range(0, view.shape[0], rows_each):
        yield slice(start, min(start + rows_each, view.shape[0]))


def keep_mask(row_keys: Tensor, num_cols: int, p: float, col_offset: int = 0) -> Tensor:
    """Boolean mask `[*row_keys.shape, num_cols]`, true with probability 1 - p.

    The comparison is of integers, so that every device and layout agrees exactly.
    """
    return _keep(row_keys, _column_states(num_cols, col_offset, row_keys.device), p)


@cached(maxsize=16)
def _column_states(num_cols: int, col_offset: int, device: torch.device) -> Tensor:
    """The columns' part of the generator's state.

    An input of the compiled mask, not a part of it: the compiler narrows an index that it can bound
    to 32 bits, in which the 64-bit product cannot be written.
    """
    return torch.arange(col_offset, col_offset + num_cols, device=device) * _GOLDEN


def _keep(row_keys: Tensor, column_states: Tensor, p: float) -> Tensor:
    return _shift_right(_mix(row_keys[..., None] + column_states), 32) >= round(p * 2**32)


@compiled_on_cuda
def _drop(x: Tensor, row_keys: Tensor, column_states: Tensor, p: float) -> Tensor:
    keep = _keep(row_keys, column_states, p)
    return torch.where(keep, x * (1.0 / (1.0 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


class _Dropout(torch.autograd.Function):
    """Linear in x and its own adjoint: the backward pass is the forward pass of the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        row_keys: Tensor,
        column_states: Tensor,
        p: float,
        mode: OperatorMode,
    ) -> Tensor:
        ctx.save_for_backward(row_keys, column_states)
        ctx.p, ctx.mode = p, mode
        return _drop(mode, x, row_keys, column_states, p)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        row_keys, column_states = ctx.saved_tensors
        return _drop(ctx.mode, grad_y, row_keys, column_states, ctx.p), None, None, None, None


def dropout(
    x: Tensor,
    p: float,
    key: int,
    row_ids: Tensor,
    col_offset: int = 0,
    mode: OperatorMode = "fused",
) -> Tensor:
    """Zero elements of `x[..., C]` with probability p and scale the rest by 1 / (1 - p).

    row_ids     int64, shape `x.shape[:-1]`: the global number of each row (token)
    col_offset  global number of the first column, where columns are sharded
    """
    if p == 0.0:
        return x
    column_states = _column_states(x.shape[-1], col_offset, x.device)
    y: Tensor = _Dropout.apply(x, bits(key, row_ids), column_states, p, mode)
    return y
