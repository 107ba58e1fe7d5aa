"""Two products summed before one reduce-scatter: the way out of a parallel block (MegaScale 3.1).

    y_tN = reduce_scatter(a_TK @ A + b_TJ @ B) + bias

It is one GEMM over the concatenated columns of a and b. To concatenate would cost a copy of both
activations a call, and weights that lie side by side. So the reduction loop of the Hopper engine
runs over the first operands, then over the second, into one accumulator; the rest of its kernel,
and its flags, are those of one product. Two calls would send twice the bytes and round both parts.

Where that engine does not run, torch accumulates both products in one buffer and a reduce-scatter
follows, with nothing overlapped.

Legend: W ranks, T rows of all ranks (m), t rows of this rank, K and J local reductions, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megascale.flux.arena import NUM_FLAGS
from megascale.flux.forms import Form
from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter, candidates, num_flags
from megascale.flux.problem import Layout, Problem
from megascale.flux.ranks import gemm
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

Pair = tuple[Tensor, Tensor]
"""The second x and weight."""


def configs(problem: Problem, capability: tuple[int, int]) -> list[FusedReduceScatter]:
    """What the fused form takes here, the default first; empty where it cannot run.

    problem  k is the sum of both reductions
    """
    c = problem.rows_a_rank
    return [
        config
        for config in candidates(problem, capability)
        if config.engine == "hopper"
        and num_flags(c, problem.n, problem.world_size, config) <= NUM_FLAGS
    ]


def fused(
    a_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    pair: Pair,
    config: FusedReduceScatter,
) -> Tensor:
    """y_tN in one kernel. All tensors contiguous."""
    from megascale.flux.gemm_reduce_scatter.hopper_launch import launch

    m, n = a_TK.shape[0], weight.shape[0 if layout == "NK" else 1]
    c = rows_per_rank(m, arena.world_size)
    first, end = shard_rows(m, arena.world_size, arena.rank)
    y_tN = a_TK.new_empty(end - first, n)
    with arena.turn(arena.world_size * c * n * a_TK.element_size()) as slot:
        launch(a_TK, weight, bias_N, y_tN, slot, arena, config, layout, pair=pair)
    return y_tN


def in_sequence(
    a_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    ranks: Any,
    *,
    layout: Layout,
    pair: Pair,
    reduce_scatter: Form,
) -> Tensor:
    """y_tN: products, then `reduce_scatter(sum_TN, ranks)`."""
    y_tN: Tensor = reduce_scatter(sum_of_products(a_TK, weight, layout, pair), ranks)
    return y_tN if bias_N is None else y_tN.add_(bias_N)


def sum_of_products(a_TK: Tensor, weight: Tensor, layout: Layout, pair: Pair) -> Tensor:
    """[T, N] of this rank; the second product is accumulated onto the first."""
    b_TJ, second = pair
    y_TN = gemm(a_TK, weight, layout=layout)
    return y_TN.addmm_(b_TJ, second.t() if layout == "NK" else second)
