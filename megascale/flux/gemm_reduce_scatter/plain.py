"""cuBLAS, then our reduce-scatter over symmetric memory. Nothing overlaps.

Legend: T rows of all ranks (m), t rows of this rank, K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.ranks import gemm

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def gemm_reduce_scatter(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Arena, *, layout: Layout
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks, plus the bias once."""
    from megascale.flux.forms import forms

    y_tN: Tensor = forms("reduce_scatter")["plain"](gemm(x_TK, weight, layout=layout), arena)
    return y_tN if bias_N is None else y_tN.add_(bias_N)
