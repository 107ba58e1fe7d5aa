"""cuBLAS, then our reduce-scatter over symmetric memory. Nothing overlaps.

Legend: T rows of all ranks (m), t rows of this rank, K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.ranks import gemm
from megascale.flux.symmetric.config import Sums
from megascale.flux.symmetric.reduce_scatter import reduce_scatter

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def gemm_reduce_scatter(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: Sums | None = None,
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks, plus the bias once.

    config  of the reduce-scatter; None: the default for the size
    """
    y_tN = reduce_scatter(gemm(x_TK, weight, layout=layout), arena, config=config)
    return y_tN if bias_N is None else y_tN.add_(bias_N)
