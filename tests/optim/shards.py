"""Build flats for optimizer tests: whole parameters, or one data rank's cut of them.

As in the runtime, parameters of one decay rule lie behind each other in a buffer that data
parallelism cuts at arbitrary elements, so that parameters span shard boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megascale.optim import Flat, Segment

Named = dict[str, Tensor]


def random_like(params: Named, seed: int) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
        for name, p in params.items()
    }


def make_flats(
    params: Named,
    *,
    dp_rank: int = 0,
    data: int = 1,
    replicated: Iterable[str] = (),
    tied_copy: Iterable[str] = (),
) -> list[Flat]:
    """Flats (decayed, not decayed) of the elements that `dp_rank` of `data` ranks owns."""
    flats = []
    for decay in (True, False):
        group = {name: p for name, p in params.items() if (p.dim() > 1) == decay}
        like = next(iter(params.values()))
        buffer = torch.cat([like.new_empty(0), *(p.flatten() for p in group.values())])
        first, last = (len(buffer) * r // data for r in (dp_rank, dp_rank + 1))
        master = buffer[first:last].clone()
        grad = torch.zeros_like(master)
        segments, start = [], 0
        for name, p in group.items():
            lo, hi = max(start, first) - first, min(start + p.numel(), last) - first
            start += p.numel()
            if lo < hi:
                views = master[lo:hi], grad[lo:hi]
                flags = name in replicated, name in tied_copy
                segments.append(Segment(name, *views, decay, *flags))
        flats.append(Flat(master, grad, decay, segments))
    return flats


def set_grads(flats: list[Flat], grads: Named, *, dp_rank: int = 0, data: int = 1) -> None:
    for flat, source in zip(flats, make_flats(grads, dp_rank=dp_rank, data=data), strict=True):
        flat.grad.copy_(source.master)


def masters(flats: list[Flat]) -> Named:
    """Concatenated pieces of each name, in order."""
    out: Named = {}
    for flat in flats:
        for s in flat.segments:
            out[s.name] = torch.cat([out.get(s.name, s.master[:0]), s.master])
    return out
