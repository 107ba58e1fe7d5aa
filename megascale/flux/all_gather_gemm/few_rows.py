"""All-gather + GEMM of few rows in one kernel (contract: `megascale.flux.few_rows`).

The rows travel while the weight's first steps are fetched into L2, so that memory is busy from the
beginning and the journey costs nothing where it takes less than that.

Flag of (source, pusher): source * pushers + pusher, the own ones included, because any program may
read rows that another one of this rank has copied. All programs read them, the last clears them.

Legend: W ranks, T rows of all ranks (m), t rows of this rank (c of a full shard), K reduction, N
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.few_rows.config import FewRows, candidates
from megascale.flux.few_rows.launch import Plan, default_config, launch, plan_of, tickets_of
from megascale.flux.problem import Layout
from megascale.flux.ranks import gemm
from megascale.flux.symmetric.one_shot.launch import pointers
from megascale.flux.tiles import ceil_div, rows_per_rank

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot

__all__ = ["FewRows", "all_gather_gemm", "candidates"]

_BLOCK_X = 2048  # elements that a pusher sends at a time: two accesses of 16 bytes a thread
_MAX_PUSHERS = 128


def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arena: Arena,
    *,
    layout: Layout,
    num_rows: int | None = None,
    gathered: bool = False,
    config: FewRows | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_TN of each weight], x_TK where `gathered`: valid until the next flux call but one).

    All tensors contiguous. `config` None: the default for the problem. Several weights are several
    launches, of which the first gathers.
    """
    world_size, k = arena.world_size, x_tK.shape[1]
    m = x_tK.shape[0] * world_size if num_rows is None else num_rows
    if world_size == 1 or m == 0:
        products = [gemm(x_tK, w, b, layout=layout) for w, b in zip(weights, biases, strict=True)]
        return products, x_tK if gathered else None
    columns = [w.shape[0 if layout == "NK" else 1] for w in weights]
    if config is None:
        config = default_config("ag_gemm", m, sum(columns), k, arena, x_tK.dtype)
    plans = [plan_of(config, m, n, k, layout) for n in columns]
    outputs = [x_tK.new_empty(m, n) for n in columns]
    row_bytes = _padded(world_size * rows_per_rank(m, world_size) * k * x_tK.element_size())
    with arena.turn(row_bytes + max(plan.partial_bytes for plan in plans)) as slot:
        for i, plan in enumerate(plans):
            _launch(
                x_tK, weights[i], biases[i], outputs[i], arena, slot, m, plan, row_bytes, i == 0
            )
        return outputs, slot.view(arena.rank, (m, k), x_tK.dtype) if gathered else None


def _padded(num_bytes: int) -> int:
    return ceil_div(num_bytes, 64) * 64


def _launch(
    x_tK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    y_TN: Tensor,
    arena: Arena,
    slot: Slot,
    m: int,
    plan: Plan,
    row_bytes: int,
    gather: bool,
) -> None:
    from megascale.flux.few_rows.kernel import gather_gemm_kernel

    world_size, k, n = arena.world_size, x_tK.shape[1], y_TN.shape[1]
    share = rows_per_rank(m, world_size) * k
    blocks = ceil_div(share, _BLOCK_X)
    pushers = min(blocks, _MAX_PUSHERS, arena.num_sms)
    arguments = {
        "x_ptr": x_tK,
        "w_ptr": weight,
        "bias_ptr": bias_N,
        "y_ptr": y_TN,
        **pointers(slot),
        "tickets_ptr": tickets_of(arena),
        "done_ptr": arena.done,
        "report_ptr": arena.report,
        "rows": m,
        "columns": n,
        "k": k,
        "share": share,
        "total": m * k,
        "pushers": pushers,
        "blocks": ceil_div(blocks, pushers),
        "partials": row_bytes // 4,
        "tiles_m": plan.tiles_m,
        "works": plan.works,
    }
    constants = {
        "RANK": arena.rank,
        "WORLD": world_size,
        "GATHER": gather,
        "HAS_BIAS": bias_N is not None,
        "BLOCK_X": _BLOCK_X,
        "BLOCK_W": 1 << (world_size - 1).bit_length(),
        "BLOCK_F": min(256, 1 << (world_size * pushers - 1).bit_length()),
        "PREFETCH_K": plan.config.prefetch_k,
        "DEADLINE_NS": arena.deadline_ns,
    }
    launch(gather_gemm_kernel, plan, arena, m, pushers, arguments, constants)
