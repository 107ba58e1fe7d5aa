"""Flats cut into tiles, as tables on the device: what kernels need to know of logical parameters.

A tile is at most TILE elements of one segment. Each tile that counts has a slot for its sums of
squares; the slots of a logical parameter lie next to each other, in the order of its flats and
segments, so the sum over them has one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.optim.segments import Flat, Segment

TILE = 16384  # elements: 64 KB of fp32; a table of 32 bytes a tile is then nothing to read


@dataclass(frozen=True)
class FlatTiles:
    """The tiles of one flat: `table` int64 [tiles, 4] as in `kernel.py`; `aligned`: 16 elements
    divide where each begins."""

    table: Tensor
    aligned: bool


class Tiles:
    """Tiles of all flats of a rank.

    index     place of each logical name
    counts    whether a segment's squares are counted (`ParameterNorms` has the rule)
    bounds    int64 [names + 1]: the slots of name i are bounds[i] to bounds[i + 1]
    """

    def __init__(
        self, flats: Sequence[Flat], index: Mapping[str, int], counts: Callable[[Segment], bool]
    ) -> None:
        device = flats[0].master.device
        num_tiles = [0] * len(index)
        for flat in flats:
            for segment in filter(counts, flat.segments):
                num_tiles[index[segment.name]] += -(-segment.master.numel() // TILE)
        bounds = torch.tensor([0, *num_tiles]).cumsum(0)
        self.num_slots = int(bounds[-1])
        self.bounds = bounds.to(device)
        free = bounds.tolist()  # the next slot of each name
        self.flats = [self._cut(flat, index, counts, free) for flat in flats]

    @staticmethod
    def _cut(
        flat: Flat,
        index: Mapping[str, int],
        counts: Callable[[Segment], bool],
        free: list[int],
    ) -> FlatTiles:
        rows, start = [torch.empty(0, 4, dtype=torch.int64)], 0
        for segment in flat.segments:
            size, name = segment.master.numel(), index[segment.name]
            firsts = torch.arange(start, start + size, TILE)
            sizes = (start + size - firsts).clamp(max=TILE)
            slots = torch.full_like(firsts, -1)
            if counts(segment):
                slots = torch.arange(free[name], free[name] + len(firsts))
                free[name] += len(firsts)
            rows.append(torch.stack([firsts, sizes, slots, torch.full_like(firsts, name)], dim=1))
            start += size
        table = torch.cat(rows)
        return FlatTiles(table.to(flat.master.device), bool((table[:, 0] % 16 == 0).all()))
