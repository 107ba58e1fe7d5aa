"""The sum of a tensor over ranks, on every rank, by one kernel over symmetric memory.

"one_shot": everybody sends everything to everybody, one hop. "two_shot": the owner of a share sums
it and sends the sum on (`two_shot/kernel.py`). By default the one that is faster by `sizes.py`.

Sums are made in fp32 in rank order: repeatable, and the same bits on all ranks.

Cost [estimated]: one_shot in band about 4 us in a graph, by flags 6 us, plus (W - 1) times the
bytes over the link; two_shot one hop of 1.5-2 us more.

Legend: T rows, the same on all ranks; D columns.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megascale.flux.symmetric import sizes
from megascale.flux.symmetric.one_shot.launch import (
    block_w,
    check_summable,
    key_of,
    sum_over_ranks,
)
from megascale.flux.symmetric.prepared import Prepared

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

Form = Literal["one_shot", "two_shot"]


def all_reduce(x_TD: Tensor, arena: Arena, form: Form | None = None) -> Tensor:
    """The sum over ranks, in a new tensor of x's type.

    x_TD  bf16, fp16 or fp32, of one shape on all ranks
    form  None chooses by size
    """
    check_summable(x_TD, arena)
    if arena.world_size == 1 or x_TD.numel() == 0:
        return x_TD.clone()
    if form is None:
        num_bytes = x_TD.numel() * x_TD.element_size()
        form = "one_shot" if sizes.shots(num_bytes, arena.world_size) == 1 else "two_shot"
    x_TD = x_TD.contiguous()
    y_TD = x_TD.new_empty(x_TD.shape)
    if form == "one_shot":
        sum_over_ranks(x_TD, y_TD, x_TD.numel(), arena, scatter=False)
    else:
        _two_shot(x_TD, y_TD, arena)
    return y_TD


def _two_shot(x_TD: Tensor, y_TD: Tensor, arena: Arena) -> None:
    world_size, total, size = arena.world_size, x_TD.numel(), x_TD.element_size()
    share = sizes.padded(
        -(-total // world_size)
    )  # aligned; the last ranks may own less, or nothing
    lanes = 2 * (world_size - 1)
    with arena.turn(lanes * share * size) as slot:
        flag_words = slot.flags[arena.rank].numel()
        in_band = sizes.fits_in_band(share, size, lanes, flag_words)
        if in_band:
            pieces = sizes.in_band_pieces(share, size)
        else:
            pieces = sizes.flag_pieces(share, size, 2 * world_size, flag_words)
        prepared = _prepare(x_TD.dtype, total, share, pieces, in_band, *key_of(arena))
        if in_band:
            prepared.launch(x_TD, y_TD, slot.flag_ptrs, arena.report)
        else:
            prepared.launch(x_TD, y_TD, slot.data_ptrs, slot.flag_ptrs, arena.report)


@lru_cache(maxsize=1024)
def _prepare(
    _dtype: torch.dtype,
    total: int,
    share: int,
    pieces: sizes.Pieces,
    in_band: bool,
    rank: int,
    world_size: int,
    deadline_ns: int,
    _device: torch.device,
) -> Prepared:
    from megascale.flux.symmetric.two_shot.kernel import (
        two_shot_by_flags_kernel,
        two_shot_in_band_kernel,
    )

    integers = {"share": share, "total": total, "part": share}
    constants: dict[str, Any] = {"RANK": rank, "WORLD": world_size, "DEADLINE_NS": deadline_ns}
    constants |= pieces.options
    if in_band:
        return Prepared(two_shot_in_band_kernel, pieces.programs, integers, constants)
    constants["BLOCK_W"] = block_w(world_size)
    integers |= pieces.rounds_of
    return Prepared(two_shot_by_flags_kernel, pieces.programs, integers, constants)
