"""One GEMM, then a reduce-scatter by the process group's backend (NCCL; gloo on CPU).

Legend: T rows of all ranks (m), t rows of this rank, K local reduction, N columns.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megascale.flux.collectives import reduce_scatter, start_reduce_scatter
from megascale.flux.problem import Layout
from megascale.flux.ranks import Ranks, gemm, padded, summed_rows
from megascale.flux.tiles import rows_per_rank, shard_rows


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


def start_gemm_reduce_scatter(
    x_TK: Tensor, weight: Tensor, arena: Ranks, *, layout: Layout
) -> Callable[[], Tensor]:
    """The same without a bias, begun: what is computed until its end is asked for may hide it."""
    num_rows, world_size = x_TK.shape[0], arena.world_size
    first, end = shard_rows(num_rows, world_size, arena.rank)
    whole_TN = gemm(x_TK, weight, layout=layout)
    whole_TN = padded(whole_TN, rows_per_rank(num_rows, world_size) * world_size)
    pending = start_reduce_scatter(whole_TN, arena.group)
    return lambda: pending.wait()[: end - first]
