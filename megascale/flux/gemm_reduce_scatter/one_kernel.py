"""A call of GEMM + reduce-scatter in one kernel: what the forms "fused" and "in_flight" share.

Legend: W ranks, T rows of all ranks (m), t rows of this rank (c of a full shard), K local
reduction, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.gemm_config import capability_of
from megascale.flux.problem import Layout, Problem
from megascale.flux.ranks import gemm
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


@dataclass(frozen=True, eq=False)
class OneKernel:
    """
    engines     by name, the module of this package whose `launch` starts the kernel; it imports
                triton
    candidates  configurations of a problem and a capability; the first is the default
    num_flags   of (rows of a shard, N, W, config)
    slabs       of [c, N] in a slot, of W ranks
    """

    engines: Mapping[str, str]
    candidates: Callable[[Problem, tuple[int, int]], list[Any]]
    num_flags: Callable[[int, int, int, Any], int]
    slabs: Callable[[int], int]

    def __call__(
        self,
        x_TK: Tensor,
        weight: Tensor,
        bias_N: Tensor | None,
        arena: Arena,
        layout: Layout,
        config: Any | None,
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
            config = _default(self, m, n, k, world_size, x_TK.dtype, arena.device)
        c = rows_per_rank(m, world_size)
        num_flags = self.num_flags(c, n, world_size, config)
        if num_flags > NUM_FLAGS:
            raise FluxError(
                f"x has {m} rows and the weight {n} columns: tiles of {config.block_m} x "
                f"{config.block_n} need {num_flags} flags and there are {NUM_FLAGS}; choose larger "
                "tiles, or split the rows over several calls"
            )
        first, end = shard_rows(m, world_size, arena.rank)
        y_tN = x_TK.new_empty(end - first, n)
        launch = _launch_of(self.engines[config.engine])
        with arena.turn(self.slabs(world_size) * c * n * x_TK.element_size()) as slot:
            launch(x_TK, weight, bias_N, y_tN, slot, arena, config, layout)
        return y_tN


@lru_cache(maxsize=1024)
def _default(
    of: OneKernel,
    m: int,
    n: int,
    k: int,
    world_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    problem = Problem("gemm_rs", m, n, k, world_size, dtype, "NK")
    return of.candidates(problem, capability_of(device))[0]


@cache
def _launch_of(module: str) -> Any:
    return import_module(f"megascale.flux.gemm_reduce_scatter.{module}").launch
