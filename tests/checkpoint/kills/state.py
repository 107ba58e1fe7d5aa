"""A state whose value after any number of steps is known: a step is x -> a x + c modulo 2**32."""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.checkpoint import Piece
from megascale.shards import Box

ROWS, COLUMNS = 512, 1024  # 2 MiB a tensor: a copy of both takes about as long as its hash
_A, _C, _MODULUS = 1664525, 1013904223, 1 << 32
_KEYS = ("master/w", "exp_avg/w")


class State:
    """What a rank holds: its rows of two tensors that it counts, a counter, a copy of another's."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rows = slice(ROWS * rank // world_size, ROWS * (rank + 1) // world_size)
        self._start = {key: _begin(number)[self._rows] for number, key in enumerate(_KEYS)}
        self._own = {key: tensor.clone() for key, tensor in self._start.items()}
        self._count = torch.zeros((), dtype=torch.int64)
        self._copy = torch.zeros(64, dtype=torch.float32)
        self._is_first = rank == 0

    def counted(self) -> list[Piece]:
        box = Box((self._rows.start, 0), (self._rows.stop - self._rows.start, COLUMNS))
        pieces = [Piece(key, (ROWS, COLUMNS), box, tensor) for key, tensor in self._own.items()]
        if self._is_first:
            pieces.append(Piece("count/steps", (), Box((), ()), self._count))
        return pieces

    def copies(self) -> list[Piece]:
        pieces = [Piece("count/norm", (64,), Box((0,), (64,)), self._copy)]
        if not self._is_first:
            pieces.append(Piece("count/steps", (), Box((), ()), self._count))
        return pieces

    def loaded(self) -> list[Piece]:
        """What a checkpoint fills."""
        return [piece for piece in (*self.counted(), *self.copies()) if piece.key != "count/norm"]

    def step(self) -> None:
        for tensor in self._own.values():
            tensor.mul_(_A).add_(_C)
        self._count += 1
        self._copy += 1

    def set_copy(self) -> None:
        """From what was loaded, as parameters follow from masters."""
        self._copy.fill_(float(self._count))

    def wrong_after(self, num_steps: int, *, with_copy: bool) -> list[str]:
        """Keys that do not hold, bit by bit, what `num_steps` make."""
        factor, term = 1, 0
        for _ in range(num_steps):
            factor, term = factor * _A % _MODULUS, (term * _A + _C) % _MODULUS
        wrong = [
            key
            for key, tensor in self._own.items()
            if not torch.equal(tensor, self._start[key] * _signed(factor) + _signed(term))
        ]
        wrong += ["count/steps"] if int(self._count) != num_steps else []
        if with_copy and not torch.equal(self._copy, torch.full((64,), float(num_steps))):
            wrong.append("count/norm")
        return wrong


def _begin(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-(1 << 31), 1 << 31, (ROWS, COLUMNS), generator=generator).int()


def _signed(number: int) -> int:
    return number - _MODULUS if number >= _MODULUS // 2 else number
