"""Configurations of the form "fused" of GEMM + reduce-scatter, for the tuner.

The communication tile is the GEMM's tile: it travels from the epilogue that made it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.gemm_config import HOPPER, GemmConfig, tiles_for
from megascale.flux.problem import Problem
from megascale.flux.tiles import ceil_div


@dataclass(frozen=True)
class FusedReduceScatter(GemmConfig):
    """
    pieces  Hopper engine: parts in which a tile is stored at its owner, two of them on their way. A
            whole tile from every SM at once fills the paths to the link, and the GEMM's own loads
            stand behind it
    chunks  Hopper engine: parts of a destination that copy engines carry (`staging.py`); 0 where
            the kernel stores tiles at their owner itself
    """

    pieces: int = 16
    chunks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pieces not in (1, 2, 4, 8, 16):
            raise FluxError(f"pieces must be 1, 2, 4, 8 or 16, got {self.pieces}")
        if self.chunks < 0:
            raise FluxError(f"chunks must be 0 or more, got {self.chunks}")


def num_flags(rows: int, n: int, world_size: int, config: GemmConfig) -> int:
    """Flags of a call: one a source and tile of a shard of `rows`."""
    return world_size * ceil_div(rows, config.block_m) * ceil_div(n, config.block_n)


def candidates(problem: Problem, capability: tuple[int, int] = HOPPER) -> list[FusedReduceScatter]:
    """Configurations worth timing for this problem; the first is the default.

    Those whose tiles are more than the flags of a slot are left out, unless that leaves none: then
    the call is refused, with these words.
    """
    c, n = problem.rows_a_rank, problem.n
    tiles = [FusedReduceScatter(**asdict(t)) for t in tiles_for(capability, c, n, problem.k)]
    staged = [
        replace(t, chunks=_chunks(c * n * problem.dtype.itemsize))
        for t in tiles
        if t.engine == "hopper"
    ]
    found = [*staged, *tiles]
    return [t for t in found if num_flags(c, n, problem.world_size, t) <= NUM_FLAGS] or tiles[:1]


def _chunks(shard_bytes: int) -> int:
    """Of a destination: 8 MB are 22 us of the link, less than a wave of tiles from K = 2048 on."""
    return min(4, ceil_div(shard_bytes, 8 << 20))
