"""GEMM + all-reduce of few rows in one kernel (contract: `megascale.flux.few_rows`).

Every program sends its part of the product to all peers and sums what it receives: one hop. Against
cuBLAS and an all-reduce it saves a launch, the round trip of the product through memory, and the
time in which neither memory nor link is busy.

Legend: T rows (m), the same on all ranks; K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.few_rows.config import FewRows, candidates
from megascale.flux.few_rows.summed.launch import summed_product
from megascale.flux.problem import Layout

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

__all__ = ["FewRows", "candidates", "gemm_all_reduce"]


def gemm_all_reduce(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: FewRows | None = None,
) -> Tensor:
    """y_TN: the product summed over ranks in rank order, plus the bias once, on every rank.

    All tensors contiguous. Repeatable, and the same bits on all ranks. `config` None: the default
    for the problem.
    """
    return summed_product(x_TK, weight, bias_N, arena, layout=layout, scatter=False, config=config)
