"""Reference tensors, and how a rank of each layout sees them. Layouts are functions of the rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megascale.checkpoint import Piece, pieces_of_range
from megascale.shards import Block, Box

Layout = Callable[[int, int, dict[str, Tensor]], list[Piece]]

# Odd sizes, so that no axis divides by 2 or 4 ranks and flat ranges cut rows.
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "master/layers.0.attn.q.weight": ((13, 7), torch.float32),
    "master/layers.0.attn.k.weight": ((3, 7), torch.float32),
    "master/layers.0.norm1.weight": ((11,), torch.bfloat16),
    "exp_avg/layers.0.attn.q.weight": ((13, 7), torch.bfloat16),
    "exp_avg/layers.0.attn.o.weight": ((5, 29), torch.float64),
    "exp_avg_sq/layers.0.attn.q.weight": ((13, 7), torch.float64),
    "count/steps": ((), torch.int64),
}


def reference() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        key: (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)
        for key, (shape, dtype) in SHAPES.items()
    }


def empty() -> dict[str, Tensor]:
    return {key: torch.full(shape, -1, dtype=dtype) for key, (shape, dtype) in SHAPES.items()}


def whole(key: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(key, shape, Box((0,) * len(shape), shape), tensor)


def _cut(num: int, rank: int, world_size: int) -> tuple[int, int]:
    return num * rank // world_size, num * (rank + 1) // world_size


def _along(axis: int, rank: int, world_size: int, tensors: dict[str, Tensor]) -> list[Piece]:
    pieces = []
    for key, tensor in tensors.items():
        if tensor.ndim == 0:
            pieces += [whole(key, tensor)] if rank == 0 else []
            continue
        cut_axis = min(axis, tensor.ndim - 1)
        start, stop = _cut(tensor.shape[cut_axis], rank, world_size)
        if start == stop:
            continue
        view = tensor.narrow(cut_axis, start, stop - start)
        offset = tuple(start if a == cut_axis else 0 for a in range(tensor.ndim))
        pieces.append(Piece(key, tuple(tensor.shape), Box(offset, tuple(view.shape)), view))
    return pieces


def rows(rank: int, world_size: int, tensors: dict[str, Tensor]) -> list[Piece]:
    return _along(0, rank, world_size, tensors)


def columns(rank: int, world_size: int, tensors: dict[str, Tensor]) -> list[Piece]:
    return _along(1, rank, world_size, tensors)


def flat_ranges(rank: int, world_size: int, tensors: dict[str, Tensor]) -> list[Piece]:
    """Elements cut evenly over the ranks, wherever in a row the cut falls, as ZeRO does."""
    pieces = []
    for key, tensor in tensors.items():
        kind, name = key.split("/")
        shape = tuple(tensor.shape)
        block = Block(name, shape, Box((0,) * len(shape), shape), start=0)
        start, stop = _cut(tensor.numel(), rank, world_size)
        flat = tensor.view(-1)[start:stop]
        pieces += pieces_of_range(kind, [block], flat, start, stop)
    return pieces


def at_rank_0(rank: int, world_size: int, tensors: dict[str, Tensor]) -> list[Piece]:
    """Replicated tensors as they are saved: by one rank."""
    return replicated(rank, world_size, tensors) if rank == 0 else []


def replicated(rank: int, world_size: int, tensors: dict[str, Tensor]) -> list[Piece]:
    return [whole(key, tensor) for key, tensor in tensors.items()]


SAVES: list[Layout] = [rows, columns, flat_ranges, at_rank_0]
LOADS: list[Layout] = [rows, columns, flat_ranges, replicated]
