"""GEMM + reduce-scatter of few rows in one kernel (contract: `megascale.flux.few_rows`).

Every program sends each owner its rows of the tile, then sums the own rows of it.

Legend: T rows of all ranks (m), t rows of this rank, K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.few_rows.config import FewRows, candidates
from megascale.flux.few_rows.summed.launch import summed_product
from megascale.flux.problem import Layout

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

__all__ = ["FewRows", "candidates", "gemm_reduce_scatter"]


def gemm_reduce_scatter(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: FewRows | None = None,
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks in rank order, plus the bias once.

    All tensors contiguous. Repeatable. `config` None: the default for the problem.
    """
    return summed_product(x_TK, weight, bias_N, arena, layout=layout, scatter=True, config=config)
