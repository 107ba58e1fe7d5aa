"""What can be tuned about the form "few_rows", for the tuner; no triton here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.problem import Problem
from megascale.flux.symmetric import sizes
from megascale.flux.tiles import ceil_div

MAX_BLOCK_M = 128
_BOTH_WAYS = 4  # configurations that are offered in band and by flags
_SMS = 132  # of an H200; only the order of candidates depends on these two
_ENOUGH = 100  # SMs that can use all of memory's bandwidth [estimated]
_SHARED_BYTES = {8: 163 << 10, 9: 227 << 10}  # of an SM, by the capability's first number
_RESERVED_BYTES = 1 << 10  # of shared memory, for each block


@dataclass(frozen=True)
class FewRows:
    """Every rank of a group uses the same in one call.

    block_n     columns of a tile, at least 64 (rows of a tensor-core instruction)
    block_k     step along the reduction
    num_stages  steps in shared memory or on their way: what keeps memory busy
    num_warps   of a program, in fours
    splits      programs that share the reduction of a tile; each stores block_n / splits columns
    prefetch_k  steps of the weight that all-gather + GEMM fetches into L2 while rows travel
    in_band     partial values announce themselves in the slot's flag words; False: flags do. None
                chooses by size (`symmetric/sizes.py`). Not of all-gather + GEMM
    """

    block_n: int = 64
    block_k: int = 128
    num_stages: int = 5
    num_warps: int = 4
    splits: int = 1
    prefetch_k: int = 1024
    in_band: bool | None = None

    def __post_init__(self) -> None:
        powers = (self.block_n, self.block_k, self.num_warps, self.splits)
        if any(value < 1 or value & (value - 1) for value in powers):
            raise FluxError(
                f"block_n, block_k, num_warps and splits must be powers of two, got {self}"
            )
        if self.block_n < 64 or self.block_k < 16 or self.block_n < 16 * self.splits:
            raise FluxError(
                "block_n must be at least 64 and 16 for each split, block_k at least 16, "
                f"got {self}"
            )
        if self.prefetch_k & (self.prefetch_k - 1) or 0 < self.prefetch_k < 64:
            raise FluxError(f"prefetch_k must be 0 or a power of two from 64 on, got {self}")


def block_m_of(num_rows: int) -> int:
    """Rows of a tile: all, up to MAX_BLOCK_M."""
    return min(MAX_BLOCK_M, max(16, 1 << (num_rows - 1).bit_length()))


def programs_an_sm(config: FewRows, num_rows: int, capability: tuple[int, int]) -> int:
    """How many run on an SM at once by shared memory and by the registers of 255 a thread.

    A launch asks the compiled kernel as well (`launch.py`) and takes the lower number.
    """
    shared = config.num_stages * (config.block_n + block_m_of(num_rows)) * config.block_k * 2
    by_shared = _SHARED_BYTES.get(capability[0], 99 << 10) // (shared + _RESERVED_BYTES)
    return min(by_shared, 8 // config.num_warps if config.num_warps <= 8 else 1)


def candidates(problem: Problem, capability: tuple[int, int] = (9, 0)) -> list[FewRows]:
    """Configurations worth timing for this problem; the first is the default."""
    found = []
    for block_n, block_k, stages, warps in _SHAPES:
        for splits in (1, 2, 4):
            config = FewRows(block_n, block_k, stages, warps, splits)
            fits = programs_an_sm(config, problem.m, capability)
            if fits and ceil_div(problem.k, block_k) >= 2 * splits:
                found.append((_cost(config, problem, fits), config))
    found.sort(key=lambda pair: pair[0])
    best = [config for _, config in found[:8]] or [FewRows(64, 32, 2, 4, 1)]
    if problem.op == "ag_gemm":
        best += [replace(best[0], prefetch_k=k) for k in (0, 256, 4096)]
    else:
        best += _by_the_other_transport(best[:_BOTH_WAYS], problem)
    return best


def _by_the_other_transport(best: list[FewRows], problem: Problem) -> list[FewRows]:
    """In band where the default is flags, and the other way round, where both can be."""
    rows = problem.rows_a_rank if problem.op == "gemm_rs" else problem.m
    parts = (rows * problem.n, problem.dtype.itemsize, problem.world_size - 1, NUM_FLAGS)
    if problem.world_size == 1 or not sizes.fits_in_band(*parts):
        return []
    return [replace(config, in_band=not sizes.goes_in_band(*parts)) for config in best]


# (block_n, block_k, stages, warps): 64 to 128 KB on their way in each program
_SHAPES = (
    (64, 128, 4, 4),
    (64, 128, 6, 4),
    (64, 256, 3, 4),
    (128, 64, 5, 4),
    (128, 128, 3, 4),
    (128, 128, 4, 8),
    (256, 64, 4, 8),
    (64, 64, 4, 4),
    (64, 32, 4, 4),
)


def _cost(config: FewRows, problem: Problem, programs: int) -> float:
    """Time over that of reading the weight once; only its order counts [calc].

    x is read from L2 once a tile column: block_m / block_n of the weight's bytes more, of which L2
    gives 1.28 times what memory does. Programs that run at once share the bandwidth whatever their
    number, if it is most of the SMs; a second wave runs alone.
    """
    tiles = ceil_div(problem.m, block_m_of(problem.m)) * ceil_div(problem.n, config.block_n)
    works = tiles * config.splits
    room = _SMS * programs
    filled = works / (ceil_div(works, room) * room) if works > room else min(1.0, works / _ENOUGH)
    from_l2 = (1 + block_m_of(problem.m) / config.block_n) / 1.28
    on_their_way = config.num_stages * config.block_n * config.block_k * 2 * min(works, room)
    starved = max(1.0, 6e6 / on_their_way)  # latency of 1 us at 4.8 TB/s, and a margin
    return max(1.0, from_l2) * starved / filled + 0.02 * (config.splits - 1)
