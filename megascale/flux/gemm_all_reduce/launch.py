"""The form "fused" for many rows: GEMM + reduce-scatter in one kernel, then the sums gathered.

The first half hides behind the GEMM (`gemm_reduce_scatter/launch.py`). The second cannot: a row is
complete only when the last tiles are. It moves (W - 1) / W of y over each link, half of what a
one-shot all-reduce of two ranks moves, and nothing is summed twice. For few rows: `few_rows.py`.

Legend: W ranks, T rows (m), the same on all ranks; t rows of this rank; K local reduction, N
columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter
from megascale.flux.gemm_reduce_scatter.launch import gemm_reduce_scatter
from megascale.flux.problem import Layout
from megascale.flux.symmetric.all_gather import all_gather, keep_started

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def gemm_all_reduce(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: FusedReduceScatter | None = None,
    view: bool = False,
) -> Tensor:
    """y_TN: the product summed over ranks in rank order, plus the bias once, on every rank.

    All tensors contiguous. `config` None: the default for the problem and the device. `view`: y_TN
    is memory of the slot, where it holds until the next flux call but one of the group begins; else
    it is copied. Two turns of the arena, which count as two calls; a gather that was started is
    ended before them. The first is complete before the second sends, so that a kernel of the second
    which does not compile leaves nothing behind. Raises FluxError where the tiles need more flags
    than a slot has.
    """
    keep_started(arena)
    y_tN = gemm_reduce_scatter(x_TK, weight, bias_N, arena, layout=layout, config=config)
    if arena.world_size == 1:
        return y_tN
    y_TN = all_gather(y_tN, arena, x_TK.shape[0], transport="flags")
    return y_TN if view else y_TN.clone()
