"""Norms of logical parameters over all their shards, without waiting for the device.

Squares are summed in fp64: the result then hardly depends on how the shards were cut, and layouts
agree to the last bits of fp32.

Counting rule: each element of a logical parameter counts once. A value that tensor-parallel ranks
replicate is counted by tensor-parallel rank 0, a tied copy by the stage that owns the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megascale.optim.segments import Flat, Segment


def _identity(tensor: Tensor) -> object:
    return tensor


@dataclass(frozen=True)
class Reductions:
    """How sums leave this rank. Each callable sums a small device tensor in place over its axis.

    names   every logical name of this pipeline stage, in one order on all its ranks (a rank may
            own no element of some of them)
    tied    names of which several pipeline stages hold something: a copy, or a part that counts by
            itself (a shared head); the same tuple on every stage
    """

    names: tuple[str, ...]
    tied: tuple[str, ...] = ()
    tp_rank: int = 0
    sum_over_data: Callable[[Tensor], object] = _identity
    sum_over_tensor: Callable[[Tensor], object] = _identity
    sum_over_pipeline: Callable[[Tensor], object] = _identity


class ParameterNorms:
    """Squared norms per logical name of a rank's flats; `index` maps a name to its place."""

    def __init__(self, flats: Sequence[Flat], reductions: Reductions) -> None:
        self.reductions = reductions
        self.index = {name: i for i, name in enumerate(reductions.names)}
        self._counted = [s for flat in flats for s in flat.segments if self.counts(s)]
        # One row a name, padded with the place of a zero that follows the segments' norms. A gather
        # and a sum keep the order of additions fixed; a scatter-add on a GPU does not.
        rows: list[list[int]] = [[] for _ in reductions.names]
        for place, segment in enumerate(self._counted):
            rows[self.index[segment.name]].append(place)
        width = max(map(len, rows), default=0)
        padded = [row + [len(self._counted)] * (width - len(row)) for row in rows]
        self._zero = torch.zeros((), dtype=torch.float64, device=flats[0].master.device)
        places = torch.tensor(padded, dtype=torch.int64, device=self._zero.device)
        self._places = places.reshape(len(rows), width)

    def counts(self, segment: Segment) -> bool:
        """Whether this rank's copy of a segment is the one that counts."""
        replica = segment.replicated and self.reductions.tp_rank != 0
        return not segment.tied_copy and not replica

    def over_shards(self, squares: Tensor) -> Tensor:
        """Sum this rank's squares [..., names] over data and tensor shards, in place.

        Names of which this stage holds only a tied copy are 0.
        """
        self.reductions.sum_over_data(squares)
        self.reductions.sum_over_tensor(squares)
        return squares

    def share_tied(self, squares: Tensor) -> None:
        """Give every stage that holds a copy or a part the whole parameter's squared norms: the sum
        over stages, in which a copy is 0. Bitwise equal on all."""
        tied = self.reductions.tied
        if not tied:
            return
        shared = squares.new_zeros(squares.shape[0], len(tied))
        here = [(k, self.index[name]) for k, name in enumerate(tied) if name in self.index]
        for k, i in here:
            shared[:, k] = squares[:, i]
        self.reductions.sum_over_pipeline(shared)
        for k, i in here:
            squares[:, i] = shared[:, k]

    def by_torch(self, attribute: Literal["master", "grad"]) -> Tensor:
        """This rank's squares by name, fp64 [names], by torch's operations."""
        tensors = [getattr(segment, attribute) for segment in self._counted]
        norms = torch._foreach_norm(tensors, 2, dtype=torch.float64) if tensors else ()
        return torch.stack([*norms, self._zero]).square()[self._places].sum(1)
