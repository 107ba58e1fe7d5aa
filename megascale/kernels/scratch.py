"""Scratch memory of kernels: where programs keep the tensor maps that they make on the device.

Triton asks for it at every launch, 128 bytes a map and program, by an allocator that a program may
have set for kernels of its own. So ours is set for a launch and no longer. Later launches go past
Triton (`kernel_call.py`) with memory that lives as long as its owner does: graphs hold its address.

Cost: nothing for a kernel that makes no maps, which is all but two here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_owned: WeakKeyDictionary[Any, dict[int, Tensor]] = WeakKeyDictionary()


def scratch_of(owner: Any, num_bytes: int) -> Tensor:
    """uint8 [num_bytes] on the current device: for one owner the same for all that want as much.

    owner  an arena: the calls of its group come one after another, so its kernels can share
    """
    known = _owned.setdefault(owner, {})
    if num_bytes not in known:
        known[num_bytes] = _from_torch(num_bytes)
    return known[num_bytes]


@contextmanager
def scratch_from_torch() -> Iterator[None]:
    """Launches by Triton inside take scratch memory from torch, on the current device.

    Triton 3.6 keeps the allocator in a context variable and has no way to ask for it: the variable
    is private there, and tests/kernels/test_scratch.py fails where it is gone.
    """
    from triton.runtime._allocation import _allocator

    before = _allocator.set(_from_torch)
    try:
        yield
    finally:
        _allocator.reset(before)


def _from_torch(size: int, _alignment: int = 0, _stream: int | None = None) -> Tensor:
    """As Triton calls it: torch aligns to 512 bytes and orders by the current stream."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")
