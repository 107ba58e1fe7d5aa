"""Slot images between ranks, over a gloo group of all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from megascale.checkpoint.memory.slot import HEADER_BYTES, MARK_AT

_CHUNK_BYTES = 1 << 28


def transfer(
    sends: Iterable[tuple[Tensor, int]],
    receives: Iterable[tuple[Tensor, int]],
    group: dist.ProcessGroup,
) -> None:
    """Send and receive whole images, each with the global rank at its other end; without the mark,
    which the receiver sets. At most one image a pair of ranks. Blocks until all have arrived."""
    works: list[dist.Work | None] = []
    for image, source in receives:
        works += [
            dist.irecv(part, src=source, group=group, tag=tag)
            for tag, part in enumerate(_parts(image))
        ]
    for image, target in sends:
        works += [
            dist.isend(part, dst=target, group=group, tag=tag)
            for tag, part in enumerate(_parts(image))
        ]
    for work in works:
        assert work is not None, "a rank outside the group"
        work.wait()


def _parts(image: Tensor) -> list[Tensor]:
    return [image[:MARK_AT], *image[HEADER_BYTES:].split(_CHUNK_BYTES)]
