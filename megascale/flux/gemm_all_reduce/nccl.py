"""One GEMM, then an all-reduce by the process group's backend (NCCL; gloo on CPU).

Legend: T rows (m), the same on all ranks; K local reduction, N columns.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.ranks import Ranks, gemm


def gemm_all_reduce(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Ranks, *, layout: Layout
) -> Tensor:
    """y_TN: the product summed over ranks, plus the bias once, on every rank."""
    y_TN = gemm(x_TK, weight, layout=layout)
    dist.all_reduce(y_TN, group=arena.group)
    return y_TN if bias_N is None else y_TN.add_(bias_N)
