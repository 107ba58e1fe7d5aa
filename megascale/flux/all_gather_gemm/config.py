"""Configurations of the form "fused" of all-gather + GEMM, for the tuner."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from megascale.errors import FluxError
from megascale.flux.gemm_config import HOPPER, GemmConfig, tiles_for
from megascale.flux.problem import Problem

_CHUNK_ROWS = 512  # least; copy engines begin slowly with every copy


@dataclass(frozen=True)
class FusedAllGather(GemmConfig):
    """
    chunks    pieces in which a shard is sent, each with a flag. More than one lets tiles of a
              remote shard begin earlier; it pays where transfers are slower than the GEMM
    """

    chunks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks < 1:
            raise FluxError(f"chunks must be at least 1, got {self.chunks}")


def candidates(problem: Problem, capability: tuple[int, int] = HOPPER) -> list[FusedAllGather]:
    """Configurations worth timing for this problem; the first is the default."""
    c = problem.rows_a_rank
    tiles = [FusedAllGather(**asdict(t)) for t in tiles_for(capability, c, problem.n, problem.k)]
    chunked = [replace(tiles[0], chunks=n) for n in (2, 4) if c >= n * _CHUNK_ROWS]
    return tiles + chunked
