"""Launch of the one-hop sums: what all-reduce (one shot) and reduce-scatter share."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.arena import NUM_FLAGS
from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.config import DEFAULT, Sums
from megascale.flux.symmetric.prepared import Prepared

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

_BLOCKS_A_FLAG = 4  # 64 KB: what a pusher sends in the time in which a flag is acknowledged
SUMMABLE = (torch.bfloat16, torch.float16, torch.float32)


def check_summable(x: Tensor, arena: Arena) -> None:
    """FluxError where the kernels cannot add this tensor up."""
    if x.dtype not in SUMMABLE:
        raise FluxError(
            f"x is {x.dtype}; sums over symmetric memory take {', '.join(map(str, SUMMABLE))}: "
            'convert it, or use mode "reference"'
        )
    if x.device.type != arena.device.type:
        raise FluxError(f"x is on {x.device} and its group on {arena.device}; move it there")


def block_w(world_size: int) -> int:
    """Lanes of a block that addresses all peers."""
    return 1 << max(0, world_size - 2).bit_length()


def sum_over_ranks(
    x: Tensor,
    y: Tensor,
    share: int,
    arena: Arena,
    *,
    scatter: bool,
    config: Sums = DEFAULT,
) -> None:
    """y = the sum over ranks of this rank's share of x, both contiguous; more than one rank.

    share    elements of a rank's share; x.numel() without `scatter`
    scatter  rank r's share begins at element r * share; without, every share is all of x
    """
    world_size, size = arena.world_size, x.element_size()
    in_band = config.goes_in_band(share, size, world_size - 1, sizes.ONE_HOP_IN_BAND_BYTES)
    prepared = _prepare(x.dtype, x.numel(), share, in_band, config.pushers, scatter, *key_of(arena))
    with arena.turn((world_size - 1) * sizes.padded(share) * size) as slot:
        if in_band:
            prepared.launch(x, y, slot.flag_ptrs, arena.report)
        else:
            prepared.launch(x, y, slot.data_ptrs, slot.flag_ptrs, arena.report)


def key_of(arena: Arena) -> tuple[int, int, int, int, torch.device]:
    """What of an arena a launch depends on: rank, world size, deadline, programs, device."""
    most = sizes.programs_of(arena.num_sms)
    return arena.rank, arena.world_size, arena.deadline_ns, most, arena.device


@lru_cache(maxsize=1024)
def _prepare(
    dtype: torch.dtype,
    total: int,
    share: int,
    in_band: bool,
    pushers: int | None,
    scatter: bool,
    rank: int,
    world_size: int,
    deadline_ns: int,
    most: int,
    _device: torch.device,
) -> Prepared:
    from megascale.flux.symmetric.one_shot import kernel

    integers = {"share": share, "total": total, "part": sizes.padded(share)}
    constants: dict[str, Any] = {"RANK": rank, "WORLD": world_size, "SCATTER": scatter}
    constants["DEADLINE_NS"] = deadline_ns
    if in_band:
        pieces = sizes.in_band_pieces(share, dtype.itemsize, most)
        integers["blocks"] = pieces.blocks
        constants |= pieces.options
        return Prepared(kernel.sum_in_band_kernel, pieces.programs, integers, constants)
    constants["BLOCK_W"] = block_w(world_size)
    if pushers is None:
        pieces = sizes.flag_pieces(share, dtype.itemsize, world_size, NUM_FLAGS, most)
        integers |= pieces.rounds_of
        constants |= pieces.options
        return Prepared(kernel.sum_by_flags_kernel, pieces.programs, integers, constants)
    if not sizes.roles_fit(share, dtype.itemsize, world_size, NUM_FLAGS):
        raise FluxError(
            f"{share} elements in blocks need more than the {NUM_FLAGS} flags of a slot; "
            "use pushers=None"
        )
    pieces = sizes.role_pieces(share, dtype.itemsize, pushers, most)
    integers |= pieces.roles_of
    constants |= {"BLOCKS": _BLOCKS_A_FLAG, **pieces.options}
    return Prepared(kernel.sum_by_roles_kernel, pieces.programs, integers, constants)
