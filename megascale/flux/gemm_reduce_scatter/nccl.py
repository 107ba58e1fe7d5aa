"""One GEMM, then a reduce-scatter by the process group's backend (NCCL; gloo on CPU).

Legend: T rows of all ranks (m), t rows of this rank, K local reduction, N columns.
"""

from __future__ import annotations

from torch import Tensor

from megascale.flux.collectives import reduce_scatter
from megascale.flux.problem import Layout
from megascale.flux.ranks import Ranks, summed_rows


def gemm_reduce_scatter(
    x_TK: Tensor, weight: Tensor, bias_N: Tensor | None, arena: Ranks, *, layout: Layout
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks, plus the bias once."""
    return summed_rows(
        x_TK,
        weight,
        bias_N,
        arena,
        layout=layout,
        scatter=lambda partial_TN: reduce_scatter(partial_TN, arena.group),
    )
