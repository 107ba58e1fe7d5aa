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
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.flux.few_rows.config import FewRows, candidates
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
from megascale.flux.tiles import ceil_div, rows_per_rank

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

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
    launches, of which the first gathers; all are compiled before it.
    """
    world_size, k = arena.world_size, x_tK.shape[1]
    m = x_tK.shape[0] * world_size if num_rows is None else num_rows
    if world_size == 1 or m == 0:
        products = [gemm(x_tK, w, b, layout=layout) for w, b in zip(weights, biases, strict=True)]
        return products, x_tK if gathered else None
    columns = tuple(w.shape[0 if layout == "NK" else 1] for w in weights)
    calls = []
    for i, bias in enumerate(biases):
        which = (i, bias is not None)
        key = ("gather", m, columns, k, x_tK.dtype, layout, config, which)
        make = partial(_prepare, arena, m, columns, k, x_tK.dtype, layout, config, which)
        calls.append(call_of(arena, key, make))
    outputs = [x_tK.new_empty(m, n) for n in columns]
    with arena.turn(max(call.num_bytes for call in calls)) as slot:
        shared = (slot.data_ptrs, slot.flag_ptrs, calls[0].tickets, arena.done, arena.report)
        tensors = [(x_tK, *term, *shared) for term in zip(weights, biases, outputs, strict=True)]
        if len(calls) > 1:
            for call, given in zip(calls, tensors, strict=True):
                call.launch.load(*given)
        for call, given in zip(calls, tensors, strict=True):
            call.launch(*given)
        return outputs, slot.view(arena.rank, (m, k), x_tK.dtype) if gathered else None


def _prepare(
    arena: Arena,
    m: int,
    columns: tuple[int, ...],
    k: int,
    dtype: torch.dtype,
    layout: Layout,
    config: FewRows | None,
    which: tuple[int, bool],
) -> Call:
    """The call of weight number which[0], with a bias or without."""
    from megascale.flux.few_rows.gathered.kernel import gather_gemm_kernel

    (number, has_bias), world_size = which, arena.world_size
    config = config or default_config("ag_gemm", m, sum(columns), k, arena, dtype)
    plan = plan_of(config, m, columns[number], k, layout)
    share = rows_per_rank(m, world_size) * k
    row_bytes = ceil_div(world_size * share * dtype.itemsize, 64) * 64
    blocks = ceil_div(share, _BLOCK_X)
    pushers = min(blocks, _MAX_PUSHERS, arena.num_sms)
    integers = {
        "rows": m,
        "columns": columns[number],
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
        "GATHER": number == 0,
        "HAS_BIAS": has_bias,
        "BLOCK_X": _BLOCK_X,
        "BLOCK_W": 1 << (world_size - 1).bit_length(),
        "BLOCK_F": min(256, 1 << (world_size * pushers - 1).bit_length()),
        "PREFETCH_K": plan.config.prefetch_k,
        "DEADLINE_NS": arena.deadline_ns,
    }
    launch = Launch(gather_gemm_kernel, plan, arena, m, pushers, integers, constants)
    return Call(launch, m, row_bytes + plan.partial_bytes, tickets_of(arena))
