"""cuBLAS, then our all-reduce over symmetric memory. Nothing overlaps.

Legend: T rows (m), the same on all ranks; K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.ranks import gemm

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def gemm_all_reduce(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Arena, *, layout: Layout
) -> Tensor:
    """y_TN: the product summed over ranks, plus the bias once, on every rank."""
    from megascale.flux.forms import forms

    y_TN: Tensor = forms("all_reduce")["plain"](gemm(x_TK, weight, layout=layout), arena)
    return y_TN if bias_N is None else y_TN.add_(bias_N)
