"""What a fused operator is asked to do, as plain numbers, and the refusal of what it cannot do.

All checks are local and precede every launch: a rank that refused after its peers had launched
would leave them waiting.

T rows of all ranks, t of this rank; K reduction, N output columns, both of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.tiles import rows_per_rank, shard_rows

Op = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
Layout = Literal["NK", "KN"]
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Problem:
    """One call. m counts the rows of all ranks, n and k are those of this rank's weight."""

    op: Op
    m: int
    n: int
    k: int
    world_size: int
    dtype: torch.dtype
    layout: Layout

    @property
    def rows_a_rank(self) -> int:
        """Rows of a rank; the last ranks own fewer where the world size does not divide m."""
        return rows_per_rank(self.m, self.world_size)


def check(
    op: Op,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: dist.ProcessGroup | None,
    layout: str,
    num_rows: int | None = None,
    *,
    fused: bool = False,
    names: tuple[str, str] = ("x", "weight"),
) -> Problem:
    """`check_at` the place of this process in `group`; None is one rank."""
    if group is not None and dist.get_rank(group) < 0:
        raise FluxError("this process is not a member of group; every caller must be")
    place = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    return check_at(op, x, weights, biases, place, layout, num_rows, fused=fused, names=names)


def check_at(
    op: Op,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    place: tuple[int, int],
    layout: str,
    num_rows: int | None = None,
    *,
    fused: bool = False,
    names: tuple[str, str] = ("x", "weight"),
) -> Problem:
    """The problem, or a FluxError that names the argument. `fused` asks for what kernels need too.

    x         [t, K] for ag_gemm, else [T, K]
    weights   [N, K] each ("NK", as nn.Linear stores it) or [K, N] ("KN")
    place     how many ranks there are, and which of them this is
    num_rows  T, where ranks hold unequal shares (ag_gemm only)
    names     of x and weights, for messages
    """
    if layout not in ("NK", "KN"):
        raise FluxError(f'weight_layout is {layout!r}; legal are "NK" (nn.Linear) and "KN"')
    if not weights:
        raise FluxError("weight is an empty sequence; give at least one weight")
    if len(biases) != len(weights):
        raise FluxError(f"there are {len(weights)} weights and {len(biases)} biases; give one each")
    world, rank = place
    of_x, of_weight = names
    _matrix(of_x, x)
    k, first_n = x.shape[1], 0
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        which = "" if len(weights) == 1 else f"[{i}]"
        _matrix(of_weight + which, weight)
        n = _columns(of_weight + which, weight, layout, of_x, k)
        same_kind(of_weight + which, weight, of_x, x)
        if bias is not None:
            _bias("bias" + which, bias, n, of_x, x)
        first_n = first_n if i else n
    m = _rows(op, of_x, x, num_rows, world, rank)
    if fused:
        _kernels_can(x, weights)
    return Problem(op, m, first_n, k, world, x.dtype, layout)  # type: ignore[arg-type] # checked


def check_rows(x: Any, num_rows: int | None, group: dist.ProcessGroup | None) -> int:
    """T of an all-gather of x [t, K] without a GEMM; FluxError where its arguments are wrong."""
    if not isinstance(x, Tensor):
        raise FluxError(f"x is {x!r}; it must be a tensor [t, K]")
    _matrix("x", x)
    world, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    m = _rows("ag_gemm", "x", x, num_rows, world, rank)
    if num_rows is None:
        refuse_unknown_rows(m)
    return m


def refuse_unknown_rows(m: int) -> None:
    """`m` is what the own rows say that all ranks have: none is what a rank without rows says."""
    if m == 0:
        raise FluxError("x has no rows on this rank; give num_rows, the rows of all ranks")


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """`value` as an int; FluxError where it is none, or below `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise FluxError(f"{name} is {value!r}; it must be an integer, {least} or more")
    return number


def same_kind(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """FluxError where two tensors of a call differ in type or device."""
    if tensor.dtype != other.dtype:
        raise FluxError(
            f"{name} is {tensor.dtype} and {other_name} is {other.dtype}; give both the same type"
        )
    if tensor.device != other.device:
        raise FluxError(
            f"{name} is on {tensor.device} and {other_name} on {other.device}; put both on one "
            "device"
        )


def _matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise FluxError(f"{name} is {list(tensor.shape)}; it must have two dimensions")


def _columns(name: str, weight: Tensor, layout: str, of_x: str, k: int) -> int:
    n, found = weight.shape if layout == "NK" else weight.shape[::-1]
    if found != k:
        wanted = f"[N, {k}]" if layout == "NK" else f"[{k}, N]"
        raise FluxError(
            f"{name} is {list(weight.shape)} and {of_x} has {k} columns; with weight_layout "
            f'"{layout}" it must be {wanted}'
        )
    return int(n)


def _bias(name: str, bias: Tensor, n: int, of_x: str, x: Tensor) -> None:
    if tuple(bias.shape) != (n,):
        raise FluxError(f"{name} is {list(bias.shape)}; it must be [{n}]")
    same_kind(name, bias, of_x, x)


def _rows(op: Op, of_x: str, x: Tensor, num_rows: int | None, world: int, rank: int) -> int:
    if num_rows is not None:
        num_rows = whole_number("num_rows", num_rows)
    if op != "ag_gemm":
        if num_rows is not None and num_rows != x.shape[0]:
            raise FluxError(
                f"num_rows is {num_rows} and {of_x} has {x.shape[0]} rows; leave num_rows out"
            )
        return int(x.shape[0])
    m = x.shape[0] * world if num_rows is None else num_rows
    first, end = shard_rows(m, world, rank)
    if end - first != x.shape[0]:
        raise FluxError(
            f"{of_x} has {x.shape[0]} rows on rank {rank} of {world} and num_rows is {m}; rank "
            f"{rank} must hold rows {first} to {end}, which are {end - first}"
        )
    return int(m)


def _kernels_can(x: Tensor, weights: Sequence[Tensor]) -> None:
    if x.dtype not in KERNEL_DTYPES:
        raise FluxError(
            f"x is {x.dtype}; fused operators take {' and '.join(map(str, KERNEL_DTYPES))}: "
            'convert it, or use mode "reference"'
        )
    if x.device.type != "cuda":
        raise FluxError(f'x is on {x.device}; fused operators need CUDA: use mode "reference"')
    for name, tensor in [("x", x), *((f"weight[{i}]", w) for i, w in enumerate(weights))]:
        if not tensor.is_contiguous():
            raise FluxError(
                f"{name} has strides {tensor.stride()}; fused operators need a contiguous tensor "
                "(for a transposed weight give its storage and the other weight_layout)"
            )
        if tensor.data_ptr() % 16 or (tensor.shape[1] * tensor.element_size()) % 16:
            raise FluxError(
                f"{name} is {list(tensor.shape)} at an address or row length that 16 bytes do not "
                "divide; fused operators need rows of a multiple of 8 elements"
            )
