"""All-gather and reduce-scatter over rows (dim 0), without a GEMM. For what only the weight
gradient needs, and as the parts of the reference operators.

A group of None is one rank: the tensor itself comes back. Started collectives return a `Pending`;
the caller may compute until it calls `wait()`. On CUDA `wait()` orders streams and does not block
the host. FluxError for what one rank sees to be wrong, before anything starts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Its default arguments are the default group of the moment it is imported, and torch imports it
# with the first optimizer or compilation. Imported before there is a group it holds none; a gloo
# group that lives until the interpreter ends now and then aborts the process, when its threads let
# go of tensors.
import torch.distributed.nn.functional
from torch import Tensor

from megascale.errors import FluxError

# torch 2.13 renames both and warns about the old names; 2.11 has only those.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A tensor that a running collective fills."""

    def __init__(self, value: Tensor, work: dist.Work | None, keep: Tensor | None = None) -> None:
        self._value = value
        self._work = work
        self._keep = keep  # the input stays alive until the collective has read it

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._keep = None
        return self._value


def all_gather_into(out: Tensor, part: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to fill `out` with every rank's `part`, in rank order."""
    return Pending(out, _gather_single(out, part, group=group, async_op=True), keep=part)


def reduce_scatter_into(out: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Pending:
    """Start to sum `whole` over ranks; `out` gets this rank's slice."""
    return Pending(out, _scatter_single(out, whole, group=group, async_op=True), keep=whole)


def start_all_gather(x_tD: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Rows of all ranks in rank order: [t, ...] to [t * ranks, ...]."""
    check_rows_of(x_tD, group)
    if group is None:
        return Pending(x_tD, None)
    x_tD = x_tD.contiguous()
    x_TD = x_tD.new_empty(x_tD.shape[0] * group.size(), *x_tD.shape[1:])
    return all_gather_into(x_TD, x_tD, group)


def start_reduce_scatter(x_TD: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Sum over ranks, each keeps its slice of rows: [T, ...] to [T / ranks, ...]."""
    check_rows_of(x_TD, group)
    if group is None:
        return Pending(x_TD, None)
    refuse_uneven_rows(x_TD, group)
    x_TD = x_TD.contiguous()
    x_tD = x_TD.new_empty(x_TD.shape[0] // group.size(), *x_TD.shape[1:])
    return reduce_scatter_into(x_tD, x_TD, group)


def all_gather(x_tD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`start_all_gather`, waited for."""
    return start_all_gather(x_tD, group).wait()


def reduce_scatter(x_TD: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """`start_reduce_scatter`, waited for."""
    return start_reduce_scatter(x_TD, group).wait()


def rank_slice(num_rows: int, group: dist.ProcessGroup | None) -> slice:
    """The rows of a gathered tensor that belong to this rank."""
    if group is None:
        return slice(0, num_rows)
    own = num_rows // group.size()
    first = torch.distributed.get_rank(group) * own
    return slice(first, first + own)


def check_rows_of(x: Any, group: Any) -> None:
    """FluxError where `x` has no rows, or `group` is no group (a non-member's is a number)."""
    if not isinstance(x, Tensor):
        raise FluxError(f"x is of type {type(x).__name__}; it must be a tensor [rows, ...]")
    if x.dim() == 0:
        raise FluxError("x has no dimension; it must be a tensor [rows, ...]")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise FluxError(
            f"group is of type {type(group).__name__}; it must be a process group that this "
            "process is a member of, or None for one rank"
        )


def refuse_uneven_rows(x_TD: Tensor, group: dist.ProcessGroup | None) -> None:
    """FluxError where ranks cannot have equally many of the rows each."""
    num_ranks = 1 if group is None else group.size()
    if x_TD.shape[0] % num_ranks:
        raise FluxError(
            f"x is {list(x_TD.shape)}, whose {x_TD.shape[0]} rows {num_ranks} ranks do not divide; "
            f"give a multiple of {num_ranks} rows, or use GemmReduceScatter, which takes any number"
        )
