"""What a fused operator is asked to do, as plain numbers, and the refusal of what it cannot do.

All checks are local and precede every launch: a rank that refused after its peers had launched
would leave them waiting.

T rows of all ranks, t of this rank; K reduction, N output columns, both of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError

Op = Literal["ag_gemm", "gemm_rs", "gemm_ar"]
Layout = Literal["NK", "KN"]
_DTYPES = (torch.bfloat16, torch.float16)


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
        return -(-self.m // self.world_size)


def own_rows(m: int, rank: int, world_size: int) -> tuple[int, int]:
    """(first, end) of the rows of a rank among m."""
    each = -(-m // world_size)
    return min(rank * each, m), min((rank + 1) * each, m)


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
) -> Problem:
    """The problem, or a FluxError that names the argument. `fused` asks for what kernels need too.

    x         [t, K] for ag_gemm, else [T, K]
    weights   [N, K] each ("NK", as nn.Linear stores it) or [K, N] ("KN")
    num_rows  T, where ranks hold unequal shares (ag_gemm only)
    """
    if layout not in ("NK", "KN"):
        raise FluxError(f'weight_layout is {layout!r}; legal are "NK" (nn.Linear) and "KN"')
    if not weights:
        raise FluxError("weight is an empty sequence; give at least one weight")
    if len(biases) != len(weights):
        raise FluxError(f"there are {len(weights)} weights and {len(biases)} biases; give one each")
    if group is not None and dist.get_rank(group) < 0:
        raise FluxError("this process is not a member of group; every caller must be")
    world, rank = (1, 0) if group is None else (group.size(), dist.get_rank(group))
    _matrix("x", x)
    k = x.shape[1]
    for name, weight, bias in _named(weights, biases):
        _matrix(name, weight)
        n = _columns(name, weight, layout, k)
        _same(name, weight, x)
        if bias is not None:
            _bias(name.replace("weight", "bias"), bias, n, x)
    m = _rows(op, x, num_rows, world, rank)
    if fused:
        _kernels_can(x, weights)
    return Problem(op, m, _columns("weight", weights[0], layout, k), k, world, x.dtype, layout)  # type: ignore[arg-type]


def _named(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[tuple[str, Tensor, Tensor | None]]:
    if len(weights) == 1:
        return [("weight", weights[0], biases[0])]
    return [
        (f"weight[{i}]", weight, bias)
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True))
    ]


def _matrix(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 2:
        raise FluxError(f"{name} is {list(tensor.shape)}; it must have two dimensions")


def _columns(name: str, weight: Tensor, layout: str, k: int) -> int:
    n, found = weight.shape if layout == "NK" else weight.shape[::-1]
    if found != k:
        wanted = f"[N, {k}]" if layout == "NK" else f"[{k}, N]"
        raise FluxError(
            f"{name} is {list(weight.shape)} and x has {k} columns; with weight_layout "
            f'"{layout}" it must be {wanted}'
        )
    return int(n)


def _same(name: str, weight: Tensor, x: Tensor) -> None:
    if weight.dtype != x.dtype:
        raise FluxError(f"{name} is {weight.dtype} and x is {x.dtype}; give both the same type")
    if weight.device != x.device:
        raise FluxError(f"{name} is on {weight.device} and x on {x.device}; put both on one device")


def _bias(name: str, bias: Tensor, n: int, x: Tensor) -> None:
    if tuple(bias.shape) != (n,):
        raise FluxError(f"{name} is {list(bias.shape)}; it must be [{n}]")
    _same(name, bias, x)


def _rows(op: Op, x: Tensor, num_rows: int | None, world: int, rank: int) -> int:
    if op != "ag_gemm":
        if num_rows is not None and num_rows != x.shape[0]:
            raise FluxError(
                f"num_rows is {num_rows} and x has {x.shape[0]} rows; leave num_rows out"
            )
        return int(x.shape[0])
    m = x.shape[0] * world if num_rows is None else num_rows
    first, end = own_rows(m, rank, world)
    if end - first != x.shape[0]:
        raise FluxError(
            f"x has {x.shape[0]} rows on rank {rank} of {world} and num_rows is {m}; rank {rank} "
            f"must hold rows {first} to {end}, which are {end - first}"
        )
    return int(m)


def _kernels_can(x: Tensor, weights: Sequence[Tensor]) -> None:
    if x.dtype not in _DTYPES:
        raise FluxError(
            f"x is {x.dtype}; fused operators take {_DTYPES[0]} and {_DTYPES[1]}: convert it, or "
            'use mode "reference"'
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
