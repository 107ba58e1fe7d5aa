"""All-gather and reduce-scatter over rows (dim 0), without a GEMM. For what only the weight
gradient needs, and as the parts of the reference operators.

A group of None is one rank: the tensor itself comes back. Started collectives return a `Pending`;
the caller may compute until it calls `wait()`. On CUDA `wait()` orders streams and does not block
the host.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# Its default arguments are the default group of the moment it is imported, and torch imports it
# with the first optimizer or compilation. Imported before there is a group it holds none; a gloo
# group that lives until the interpreter ends now and then aborts the process, when its threads let
# go of tensors.
import torch.distributed.nn.functional
from torch import Tensor

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
    if group is None:
        return Pending(x_tD, None)
    x_tD = x_tD.contiguous()
    x_TD = x_tD.new_empty(x_tD.shape[0] * group.size(), *x_tD.shape[1:])
    return all_gather_into(x_TD, x_tD, group)


def start_reduce_scatter(x_TD: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Sum over ranks, each keeps its slice of rows: [T, ...] to [T / ranks, ...]."""
    if group is None:
        return Pending(x_TD, None)
    assert x_TD.shape[0] % group.size() == 0, (tuple(x_TD.shape), group.size())
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
