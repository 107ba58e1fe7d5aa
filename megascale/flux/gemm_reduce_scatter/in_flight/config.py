"""Configurations of the form "in_flight" of GEMM + reduce-scatter, for the tuner."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.gemm_config import HOPPER, GemmConfig, tiles_for
from megascale.flux.problem import Problem
from megascale.flux.tiles import ceil_div

PIECES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class InFlightReduceScatter(GemmConfig):
    """
    pieces  Hopper engine: parts in which a tile travels, two of them on their way
    """

    pieces: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pieces not in PIECES:
            raise FluxError(f"pieces must be one of {PIECES}, got {self.pieces}")


def num_flags(rows: int, n: int, world_size: int, config: GemmConfig) -> int:
    """Flags of a call at every rank: one a hop and tile of a shard of `rows`."""
    return (world_size - 1) * ceil_div(rows, config.block_m) * ceil_div(n, config.block_n)


def candidates(
    problem: Problem, capability: tuple[int, int] = HOPPER
) -> list[InFlightReduceScatter]:
    """Configurations worth timing for this problem; the first is the default.

    Those whose tiles are more than the flags of a slot are left out, unless that leaves none: then
    the call is refused, with these words.
    """
    c, n, world = problem.rows_a_rank, problem.n, problem.world_size
    tiles = [InFlightReduceScatter(**asdict(t)) for t in tiles_for(capability, c, n, problem.k)]
    return [t for t in tiles if num_flags(c, n, world, t) <= NUM_FLAGS] or tiles[:1]
