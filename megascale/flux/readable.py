"""What kernels can read as it lies: contiguous, from an address that 16 divides.

x and biases that are not are copied; a rank may do so alone, since it decides nothing. A weight is
never copied, that would be a pass over memory in every call: how it lies is part of the contract.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_readable(x: Tensor) -> bool:
    """Whether kernels can read it."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy where it has gaps or begins at an address that 16 does not divide."""
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def readable_biases(biases: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The same of each: kernels load a bias by its address plus the column."""
    for bias in biases:
        if bias is not None and not is_readable(bias):
            return [None if bias is None else readable(bias) for bias in biases]
    return biases
