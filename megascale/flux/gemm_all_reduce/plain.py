"""cuBLAS, then our all-reduce over symmetric memory. Nothing overlaps.

Legend: T rows (m), the same on all ranks; K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.ranks import gemm
from megascale.flux.symmetric.all_reduce import all_reduce
from megascale.flux.symmetric.config import Sums

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def gemm_all_reduce(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: Sums | None = None,
    view: bool = False,
) -> Tensor:
    """y_TN: the product summed over ranks, plus the bias once, on every rank.

    config  None: the default for the size
    view    y_TN may lie in the slot, until the next flux call but one of the group begins
    """
    product_TN = gemm(x_TK, weight, layout=layout)
    y_TN = all_reduce(product_TN, arena, config=config, view=view)
    return y_TN if bias_N is None else y_TN.add_(bias_N)
