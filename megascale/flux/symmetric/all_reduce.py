"""The sum of a tensor over ranks, on every rank, by one kernel over symmetric memory.

In one hop everybody sends everything to everybody. In two the owner of a share sums it and sends
the sum on (`two_shot/kernel.py`). Which, and how it travels, is said by `Sums`, else by the size.

One hop writes y itself (`sum_block`, `sum_in_band_kernel` in `one_shot/kernel.py`), so there is no
copy to be saved by leaving the result in the slot. Two hops by flags receive sums there and copy
them; with `view` they stay.

Sums are made in fp32 in rank order: repeatable, and the same bits on all ranks.

Cost [estimated]: one_shot in band about 4 us in a graph, by flags 6 us, plus (W - 1) times the
bytes over the link; two_shot one hop of 1.5-2 us more.

Legend: T rows, the same on all ranks; D columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megascale.flux.arena import NUM_FLAGS
from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.config import DEFAULT, Sums, hop_share
from megascale.flux.symmetric.one_shot.launch import (
    block_w,
    check_summable,
    key_of,
    sum_over_ranks,
)
from megascale.flux.symmetric.prepared import Prepared

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def all_reduce(
    x_TD: Tensor, arena: Arena, *, config: Sums | None = None, view: bool = False
) -> Tensor:
    """The sum over ranks, of x's type.

    x_TD    bf16, fp16 or fp32, of one shape on all ranks
    config  None chooses by size
    view    the result may lie in the slot, where it holds until the next flux call but one of the
            group begins; else it is a new tensor
    """
    check_summable(x_TD, arena)
    if arena.world_size == 1 or x_TD.numel() == 0:
        return x_TD.clone()
    config = config or DEFAULT
    num_bytes = x_TD.numel() * x_TD.element_size()
    x_TD = x_TD.contiguous()
    if (config.shots or sizes.shots(num_bytes, arena.world_size)) == 2:
        return _two_shot(x_TD, arena, config, view=view)
    y_TD = x_TD.new_empty(x_TD.shape)
    sum_over_ranks(x_TD, y_TD, x_TD.numel(), arena, scatter=False, config=config)
    return y_TD


def _two_shot(x_TD: Tensor, arena: Arena, config: Sums, *, view: bool) -> Tensor:
    world_size, total, size = arena.world_size, x_TD.numel(), x_TD.element_size()
    share = hop_share(total, world_size)
    in_band = config.goes_in_band(share, size, 2 * (world_size - 1))
    view = view and not in_band
    prepared = _prepare(x_TD.dtype, total, share, in_band, view, *key_of(arena))
    with arena.turn((2 * world_size - 1) * share * size) as slot:
        if view:
            y_TD = slot.view(arena.rank, x_TD.shape, x_TD.dtype, (world_size - 1) * share * size)
        else:
            y_TD = x_TD.new_empty(x_TD.shape)
        if in_band:
            prepared.launch(x_TD, y_TD, slot.flag_ptrs, arena.report)
        else:
            prepared.launch(x_TD, y_TD, slot.data_ptrs, slot.flag_ptrs, arena.report)
    return y_TD


@lru_cache(maxsize=1024)
def _prepare(
    dtype: torch.dtype,
    total: int,
    share: int,
    in_band: bool,
    view: bool,
    rank: int,
    world_size: int,
    deadline_ns: int,
    most: int,
    _device: torch.device,
) -> Prepared:
    from megascale.flux.symmetric.two_shot.kernel import (
        two_shot_by_flags_kernel,
        two_shot_in_band_kernel,
    )

    integers = {"share": share, "total": total, "part": share}
    constants: dict[str, Any] = {"RANK": rank, "WORLD": world_size, "DEADLINE_NS": deadline_ns}
    if in_band:
        pieces = sizes.in_band_pieces(share, dtype.itemsize, most)
        integers["blocks"] = pieces.blocks
        constants |= pieces.options
        return Prepared(two_shot_in_band_kernel, pieces.programs, integers, constants)
    pieces = sizes.flag_pieces(share, dtype.itemsize, 2 * world_size, NUM_FLAGS, most)
    constants |= {"VIEW": view, "BLOCK_W": block_w(world_size), **pieces.options}
    integers |= pieces.rounds_of
    return Prepared(two_shot_by_flags_kernel, pieces.programs, integers, constants)
