"""The form "fused": one kernel whose epilogue stores each tile at its owner, and whose tiles of the
own shard, which come last, add what the peers have stored (Flux 3.1; order and flags: protocol.py).

No barrier and no pass that reduces; a copy stream where tiles are staged on their way (staging.py).

Legend: W ranks, T rows of all ranks (m), t rows of this rank (c of a full shard), K local
reduction, N columns.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.gemm_config import capability_of
from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter, candidates, num_flags
from megascale.flux.problem import Layout, Problem
from megascale.flux.ranks import gemm
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def gemm_reduce_scatter(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: FusedReduceScatter | None = None,
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks, plus the bias once.

    All tensors contiguous. `config` None: the default for the problem and the device.
    Raises FluxError where a call of these tiles needs more flags than a slot has.
    """
    world_size = arena.world_size
    if world_size == 1:
        return gemm(x_TK, weight, bias_N, layout=layout)
    (m, k), n = x_TK.shape, weight.shape[0 if layout == "NK" else 1]
    if config is None:
        config = _default(m, n, k, world_size, x_TK.dtype, arena.device)
    c = rows_per_rank(m, world_size)
    if num_flags(c, n, world_size, config) > NUM_FLAGS:
        raise FluxError(
            f"x has {m} rows and the weight {n} columns: tiles of {config.block_m} x "
            f"{config.block_n} need {num_flags(c, n, world_size, config)} flags and there are "
            f"{NUM_FLAGS}; choose larger tiles, or split the rows over several calls"
        )
    first, end = shard_rows(m, world_size, arena.rank)
    y_tN = x_TK.new_empty(end - first, n)
    with arena.turn(world_size * c * n * x_TK.element_size()) as slot:
        _engine(config.engine)(x_TK, weight, bias_N, y_tN, slot, arena, config, layout)
    return y_tN


@lru_cache(maxsize=1024)
def _default(
    m: int, n: int, k: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> FusedReduceScatter:
    problem = Problem("gemm_rs", m, n, k, world_size, dtype, "NK")
    return candidates(problem, capability_of(device))[0]


@cache
def _engine(name: str) -> Any:
    """The `launch` of an engine; its module imports triton."""
    module = "hopper_launch" if name == "hopper" else "kernel"
    return import_module(f"megascale.flux.gemm_reduce_scatter.{module}").launch
