"""What can be tuned about sums over ranks (the form "plain"), for the tuner; no triton here.

Transport and number of hops are chosen by size where nothing was measured (`sizes.py`). The limits
there are few measurements and arithmetic, so the tuner offers what lies on their other side too.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.problem import Problem
from megascale.flux.symmetric import sizes

PUSHERS = (32, 16)  # 8 fill a link with large pieces; more where each waits for its flags
_HOPS_BYTES = 64 << 10  # below it a second journey takes longer than what it saves
_ROLES_BYTES = 1 << 20  # below it all sums together take less than the flags of a second role


@dataclass(frozen=True)
class Sums:
    """How a sum over ranks travels. None: chosen by size. All ranks of a group use the same.

    in_band  the data announces itself, in the slot's flag words (`kernel.py`); False: flags do
    pushers  by flags: so many programs only send, and the others only sum
    shots    hops of an all-reduce, 1 or 2
    """

    in_band: bool | None = None
    pushers: int | None = None
    shots: int | None = None

    def __post_init__(self) -> None:
        if self.shots not in (None, 1, 2):
            raise FluxError(f"shots must be 1, 2 or None, got {self}")
        if self.pushers is not None and not 0 < self.pushers < sizes.MAX_PROGRAMS:
            raise FluxError(f"pushers must be 1 to {sizes.MAX_PROGRAMS - 1}, or None, got {self}")
        if self.pushers is not None and (self.in_band or self.shots == 2):
            raise FluxError(f"pushers are for sums by flags in one hop, got {self}")

    def goes_in_band(
        self,
        elements: int,
        word_bytes: int,
        parts: int,
        limit_bytes: int = sizes.IN_BAND_BYTES,
    ) -> bool:
        """Whether `parts` parts of `elements` words do: up to `limit_bytes` where nothing is said.
        FluxError where they must and cannot."""
        if self.in_band is False or self.pushers is not None:
            return False
        if self.in_band is None:
            return sizes.goes_in_band(elements, word_bytes, parts, NUM_FLAGS, limit_bytes)
        if not sizes.fits_in_band(elements, word_bytes, parts, NUM_FLAGS):
            raise FluxError(
                f"{parts} parts of {elements} elements of {word_bytes} bytes do not fit into the "
                f"{NUM_FLAGS} flag words of a slot; use in_band=False, or None"
            )
        return True


DEFAULT = Sums()


def candidates(problem: Problem) -> list[Sums | None]:
    """Configurations worth timing for this problem; the first is the default, which has no name."""
    found: list[Sums | None] = [None]
    world_size, size = problem.world_size, problem.dtype.itemsize
    if world_size == 1:
        return found
    scatter = problem.op == "gemm_rs"
    share = (problem.rows_a_rank if scatter else problem.m) * problem.n
    shots = 1 if scatter else sizes.shots(share * size, world_size)
    if scatter and share * size > sizes.COPY_ENGINE_BYTES:
        return found
    one_hop = shots == 1
    if one_hop and sizes.fits_in_band(share, size, world_size - 1, NUM_FLAGS):
        is_default = DEFAULT.goes_in_band(share, size, world_size - 1, sizes.ONE_HOP_IN_BAND_BYTES)
        found.append(Sums(in_band=not is_default))
    many = share * size > _ROLES_BYTES and sizes.roles_fit(share, size, world_size, NUM_FLAGS)
    by_roles = [Sums(pushers=pushers) for pushers in PUSHERS if one_hop and many]
    hops: list[Sums | None] = [] if scatter else _with_other_hops(share, size, world_size, shots)
    return [*found, *by_roles[:1], *hops, *by_roles[1:]]


def _with_other_hops(total: int, size: int, world_size: int, shots: int) -> list[Sums | None]:
    """The number of hops that is not the default, and the other transport of two hops."""
    if shots == 1:
        return [Sums(shots=2)] if total * size > _HOPS_BYTES else []
    share, lanes = hop_share(total, world_size), 2 * (world_size - 1)
    found: list[Sums | None] = [Sums(shots=1)]
    if sizes.fits_in_band(share, size, lanes, NUM_FLAGS):
        is_default = sizes.goes_in_band(share, size, lanes, NUM_FLAGS)
        found.append(Sums(in_band=not is_default, shots=2))
    return found


def hop_share(total: int, world_size: int) -> int:
    """Elements that a rank sums in the first of two hops; the last ranks may own less, or none."""
    return sizes.padded(-(-total // world_size))
