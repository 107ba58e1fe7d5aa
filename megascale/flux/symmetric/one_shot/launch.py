"""Launch of the one-hop sums: what all-reduce (one shot) and reduce-scatter share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.symmetric import sizes

if TYPE_CHECKING:
    from megascale.flux.arena import Arena, Slot

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


def sum_over_ranks(x: Tensor, y: Tensor, share: int, arena: Arena, *, scatter: bool) -> None:
    """y = the sum over ranks of this rank's share of x, both contiguous; more than one rank.

    share    elements of a rank's share; x.numel() without `scatter`
    scatter  rank r's share begins at element r * share; without, every share is all of x
    """
    from megascale.flux.kernel_call import launch
    from megascale.flux.symmetric.one_shot.kernel import sum_by_flags_kernel, sum_in_band_kernel

    world_size, size = arena.world_size, x.element_size()
    part = sizes.padded(share)
    with arena.turn((world_size - 1) * part * size) as slot:
        flag_words = slot.flags[arena.rank].numel()
        constants = {
            "RANK": arena.rank,
            "WORLD": world_size,
            "SCATTER": scatter,
            "DEADLINE_NS": arena.deadline_ns,
        }
        sizes_of = {"share": share, "total": x.numel(), "part": part}
        if sizes.fits_in_band(share, size, world_size - 1, flag_words):
            pieces = sizes.in_band_pieces(share, size)
            tensors = {"x_ptr": x, "y_ptr": y, "flag_ptrs": slot.flag_ptrs}
            arguments = {**tensors, "report_ptr": arena.report, **sizes_of}
            launch(sum_in_band_kernel, pieces.programs, arguments, {**constants, **pieces.options})
            return
        pieces = sizes.flag_pieces(share, size, world_size, flag_words)
        tensors = {"x_ptr": x, "y_ptr": y, **pointers(slot), "report_ptr": arena.report}
        arguments = {**tensors, **sizes_of, **pieces.rounds_of}
        constants |= {"BLOCK_W": block_w(world_size), **pieces.options}
        launch(sum_by_flags_kernel, pieces.programs, arguments, constants)


def pointers(slot: Slot) -> dict[str, Tensor]:
    """The addresses of all ranks' memory, as kernels name them."""
    return {"data_ptrs": slot.data_ptrs, "flag_ptrs": slot.flag_ptrs}
