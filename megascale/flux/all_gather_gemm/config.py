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
    c_split   Hopper engine: 2 passes the output tile through shared memory in halves, which
              leaves room for another stage of operands
    """

    chunks: int = 1
    c_split: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks < 1 or self.c_split not in (1, 2):
            raise FluxError(
                f"chunks must be at least 1 and c_split 1 or 2, got {self.chunks}, {self.c_split}"
            )


def candidates(problem: Problem, capability: tuple[int, int] = HOPPER) -> list[FusedAllGather]:
    """Configurations worth timing for this problem; the first is the default."""
    c = problem.rows_a_rank
    tiles = [FusedAllGather(**asdict(t)) for t in tiles_for(capability, c, problem.n, problem.k)]
    best = tiles[0]
    more = [replace(best, group_m=16), replace(best, group_m=4)]
    if best.engine == "hopper":
        more.append(replace(best, num_stages=4, c_split=2))
    more += [replace(best, chunks=n) for n in (2, 4) if c >= n * _CHUNK_ROWS]
    return tiles + more
