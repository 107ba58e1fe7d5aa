"""Launch of the GEMM whose tiles are summed over ranks: GEMM + all-reduce and + reduce-scatter.

Legend: W ranks, T rows of all ranks (m), t rows of this rank, K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.few_rows.config import FewRows
from megascale.flux.few_rows.launch import (
    Call,
    Launch,
    call_of,
    default_config,
    plan_of,
    tickets_of,
)
from megascale.flux.problem import Layout
from megascale.flux.ranks import gemm
from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.config import Sums
from megascale.flux.symmetric.one_shot.launch import block_w
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def summed_product(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    scatter: bool,
    config: FewRows | None,
) -> Tensor:
    """y_TN, or y_tN with `scatter`: the product summed over ranks, plus the bias once."""
    (m, k), n = x_TK.shape, weight.shape[0 if layout == "NK" else 1]
    if arena.world_size == 1 or m == 0:
        return gemm(x_TK, weight, bias_N, layout=layout)
    has_bias = bias_N is not None
    key = (scatter, m, n, k, x_TK.dtype, layout, config, has_bias)
    call = call_of(
        arena,
        key,
        lambda: _prepare(arena, (m, n, k), x_TK.dtype, layout, config, scatter, has_bias),
    )
    y = x_TK.new_empty(call.num_rows, n)
    with arena.turn(call.num_bytes) as slot:
        call.launch(
            x_TK, weight, bias_N, y, slot.data_ptrs, slot.flag_ptrs, call.tickets, arena.report
        )
    return y


def _prepare(
    arena: Arena,
    mnk: tuple[int, int, int],
    dtype: torch.dtype,
    layout: Layout,
    config: FewRows | None,
    scatter: bool,
    has_bias: bool,
) -> Call:
    from megascale.flux.few_rows.summed.kernel import gemm_sum_kernel

    (m, n, k), world_size, size = mnk, arena.world_size, dtype.itemsize
    config = config or default_config("gemm_rs" if scatter else "gemm_ar", m, n, k, arena, dtype)
    plan = plan_of(config, m, n, k, layout)
    share = rows_per_rank(m, world_size) if scatter else m
    part = sizes.padded(share * n)
    received = (world_size - 1) * part * size
    in_band = Sums(config.in_band).goes_in_band(share * n, size, world_size - 1)
    if not in_band and world_size * plan.works > NUM_FLAGS:
        raise FluxError(
            f"{m} rows and {n} columns in tiles of {config.block_n} need {world_size * plan.works} "
            f"flags and there are {NUM_FLAGS}; give a larger block_n, or take another form"
        )
    integers = {
        "rows": m,
        "columns": n,
        "k": k,
        "share": share,
        "part": part,
        "partials": received // 4,
        "tiles_m": plan.tiles_m,
        "works": plan.works,
    }
    constants = {
        "RANK": arena.rank,
        "WORLD": world_size,
        "SCATTER": scatter,
        "HAS_BIAS": has_bias,
        "IN_BAND": in_band,
        "BLOCK_W": block_w(world_size),
        "DEADLINE_NS": arena.deadline_ns,
    }
    first, end = shard_rows(m, world_size, arena.rank) if scatter else (0, m)
    launch = Launch(gemm_sum_kernel, plan, arena, m, 1, integers, constants)
    return Call(launch, end - first, received + plan.partial_bytes, tickets_of(arena))
