"""Launch of the GEMM whose tiles are summed over ranks: GEMM + all-reduce and + reduce-scatter.

Legend: W ranks, T rows of all ranks (m), t rows of this rank, K local reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.few_rows.config import FewRows
from megascale.flux.few_rows.launch import default_config, launch, plan_of, tickets_of
from megascale.flux.problem import Layout, Op, own_rows
from megascale.flux.ranks import gemm
from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.one_shot.launch import block_w, pointers
from megascale.flux.tiles import rows_per_rank

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
    world_size = arena.world_size
    (m, k), n = x_TK.shape, weight.shape[0 if layout == "NK" else 1]
    if world_size == 1 or m == 0:
        return gemm(x_TK, weight, bias_N, layout=layout)
    if config is None:
        op: Op = "gemm_rs" if scatter else "gemm_ar"
        config = default_config(op, m, n, k, arena, x_TK.dtype)
    plan = plan_of(config, m, n, k, layout)
    share = rows_per_rank(m, world_size) if scatter else m
    first, end = own_rows(m, arena.rank, world_size) if scatter else (0, m)
    y = x_TK.new_empty(end - first, n)
    part = sizes.padded(share * n)
    received = (world_size - 1) * part * x_TK.element_size()
    tickets = tickets_of(arena)
    with arena.turn(received + plan.partial_bytes) as slot:
        from megascale.flux.few_rows.kernel import gemm_sum_kernel

        flag_words = slot.flags[arena.rank].numel()
        in_band = sizes.fits_in_band(share * n, x_TK.element_size(), world_size - 1, flag_words)
        assert in_band or world_size * plan.works <= flag_words, (plan, flag_words)
        arguments = {
            "x_ptr": x_TK,
            "w_ptr": weight,
            "bias_ptr": bias_N,
            "y_ptr": y,
            **pointers(slot),
            "tickets_ptr": tickets,
            "report_ptr": arena.report,
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
            "HAS_BIAS": bias_N is not None,
            "IN_BAND": in_band,
            "BLOCK_W": block_w(world_size),
            "DEADLINE_NS": arena.deadline_ns,
        }
        launch(gemm_sum_kernel, plan, arena, m, 1, arguments, constants)
    return y
