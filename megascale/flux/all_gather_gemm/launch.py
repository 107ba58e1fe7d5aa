"""The form "fused": copy engines push the shard to every peer while one kernel multiplies what is
there (Flux 3.2; order and flags: protocol.py).

Kernels are compiled and loaded first, so that one that cannot be has sent nothing. Then pushes are
enqueued on the copy stream before a kernel is launched, so that no hardware queue has them behind a
kernel that waits for a peer's. Of several weights each has a launch; the first waits for the
gather, the last resets the flags.

Legend: W ranks, T rows of all ranks, t rows of this rank (c of a full shard), K reduction, N
columns of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.flux.all_gather_gemm.config import FusedAllGather, candidates
from megascale.flux.all_gather_gemm.protocol import GatherTiles
from megascale.flux.gemm_config import capability_of
from megascale.flux.lanes import Send, push, remembered
from megascale.flux.problem import Layout, Problem
from megascale.flux.ranks import gemm
from megascale.flux.tiles import rows_per_rank, shard_rows

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot


def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arena: Arena,
    *,
    layout: Layout,
    num_rows: int | None = None,
    gathered: bool = False,
    config: FusedAllGather | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_TN of each weight], x_TK where `gathered`: valid until the next flux call but one).

    All tensors contiguous. `config` None: the default for the problem and the device.
    """
    world_size = arena.world_size
    num_rows = x_tK.shape[0] * world_size if num_rows is None else num_rows
    if world_size == 1:
        products = [gemm(x_tK, w, b, layout=layout) for w, b in zip(weights, biases, strict=True)]
        return products, x_tK if gathered else None
    columns = [w.shape[0 if layout == "NK" else 1] for w in weights]
    k = x_tK.shape[1]
    if config is None:
        config = _default(num_rows, columns[0], k, world_size, x_tK.dtype, arena.device)
    prepared = _engine(config.engine)
    outputs = [x_tK.new_empty(num_rows, n) for n in columns]
    c = rows_per_rank(num_rows, world_size)
    with arena.turn(world_size * c * k * x_tK.element_size()) as slot:
        plan = remembered(
            slot,
            (_Plan, num_rows, k, x_tK.dtype, config.block_m, config.chunks),
            lambda: _Plan(slot, num_rows, k, x_tK.dtype, config),
        )
        launches = [
            prepared(
                x_tK, plan.x_WcK, weight, bias, y_TN, slot, arena, config, layout, num_rows,
                clear=i == len(outputs) - 1,
            )
            for i, (weight, bias, y_TN) in enumerate(zip(weights, biases, outputs, strict=True))
        ]  # fmt: skip
        push(arena, plan.sends, x_tK.data_ptr())
        if gathered or plan.straddling:
            plan.x_tK.copy_(x_tK)
        for launch in launches:
            launch()
        arena.join()  # x may be overwritten by what follows on the current stream
    return outputs, plan.x_TK if gathered else None


class _Plan:
    """Where the shard of a call goes, for one slot: views that cost more to make than to copy to.

    x_WcK     the own slot; x_TK its rows of all ranks, x_tK those of this rank
    sends     every chunk to every peer
    """

    def __init__(
        self, slot: Slot, num_rows: int, k: int, dtype: torch.dtype, config: FusedAllGather
    ) -> None:
        rank, world_size, row_bytes = slot.rank, slot.world_size, k * dtype.itemsize
        tiles = GatherTiles(num_rows, world_size, rank, config.block_m, 1, 1, config.chunks)
        first, end = shard_rows(num_rows, world_size, rank)
        self.straddling = tiles.straddling
        self.x_WcK = slot.view(rank, (world_size, tiles.rows_per_rank, k), dtype)
        self.x_TK = self.x_WcK.view(-1, k)[:num_rows]
        self.x_tK = self.x_TK[first:end]
        self.sends = [
            Send(
                slot.data[s.peer].data_ptr() + s.first_row * row_bytes,
                (s.first_row - first) * row_bytes,
                (s.end_row - s.first_row) * row_bytes,
                slot.flags[s.peer].data_ptr() + 4 * s.flag,
            )
            for s in tiles.sends()
        ]


@lru_cache(maxsize=1024)
def _default(
    m: int, n: int, k: int, world_size: int, dtype: torch.dtype, device: torch.device
) -> FusedAllGather:
    problem = Problem("ag_gemm", m, n, k, world_size, dtype, "NK")
    return candidates(problem, capability_of(device))[0]


@cache
def _engine(name: str) -> Any:
    """The `prepared` of an engine; its module imports triton."""
    module = "hopper" if name == "hopper" else "kernel"
    return import_module(f"megascale.flux.all_gather_gemm.{module}").prepared
