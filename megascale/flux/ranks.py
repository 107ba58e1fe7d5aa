"""What the forms without a kernel of their own share: who takes part, and the GEMM of torch.

On CUDA that GEMM is cuBLAS, on CPU whatever torch has, so these forms run everywhere.

Legend: W ranks, T rows of all ranks (m), t rows of one rank (c = ceil(m / W), the last ranks fewer
or none), K reduction, N output columns. Weights "NK" as nn.Linear stores them, or "KN".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.tiles import rows_per_rank, shard_rows


class Ranks(Protocol):
    """The part of an arena that a form without symmetric memory needs."""

    @property
    def group(self) -> dist.ProcessGroup: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class GroupOnly:
    """A group without symmetric memory (CPU, or no peer access): enough for "nccl" alone."""

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def world_size(self) -> int:
        return self.group.size()


def gemm(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None = None,
    *,
    layout: Layout,
    out_TN: Tensor | None = None,
) -> Tensor:
    """x @ W (+ bias), of torch. `out_TN`, where given, is written and returned."""
    weight_KN = weight.t() if layout == "NK" else weight
    if bias_N is None:
        return torch.mm(x_TK, weight_KN, out=out_TN)
    return torch.addmm(bias_N, x_TK, weight_KN, out=out_TN)


def padded(x_tD: Tensor, num_rows: int) -> Tensor:
    """`x_tD` with rows of zeros up to `num_rows`; itself where it has as many."""
    missing = num_rows - x_tD.shape[0]
    if missing == 0:
        return x_tD.contiguous()
    return torch.nn.functional.pad(x_tD, (0, 0, 0, missing))


def summed_rows(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    ranks: Ranks,
    *,
    layout: Layout,
    scatter: Callable[[Tensor], Tensor],
) -> Tensor:
    """y_tN of GEMM + reduce-scatter, where `scatter` sums [W * c, N] to this rank's [c, N].

    Rows beyond m are uninitialised and sum to rows that are cut off: no pass to clear them.
    The bias is added once, by the owner of the rows.
    """
    num_rows, num_columns = x_TK.shape[0], weight.shape[0 if layout == "NK" else 1]
    c = rows_per_rank(num_rows, ranks.world_size)
    partial_TN = x_TK.new_empty(c * ranks.world_size, num_columns)
    gemm(x_TK, weight, layout=layout, out_TN=partial_TN[:num_rows])
    first, end = shard_rows(num_rows, ranks.world_size, ranks.rank)
    y_tN = scatter(partial_TN)[: end - first]
    return y_tN if bias_N is None else y_tN.add_(bias_N)
