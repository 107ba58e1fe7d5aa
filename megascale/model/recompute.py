"""Activation recomputation: keep less in forward, compute it again in backward.

No generator state is saved: dropout is a function of counters (`ops.random`), so a recomputed mask
is the same mask.

- full: each layer keeps its input alone.
- selective: the MLP's activated tensor (the widest of a layer) is not kept for the weight gradient
  of fc2; it is made again from the output of fc1, which the activation's own backward keeps anyway.
  Attention scores are recomputed where they are materialised (attention dropout); the other
  attention kernels never keep them (Korthikanti et al. 2022 recompute what such kernels avoid).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def checkpointed(fn: Callable[..., Tensor], *args: Any) -> Tensor:
    """`fn(*args)`, keeping only the arguments."""
    y: Tensor = checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
    return y


def remade(value: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[None]:
    """Inside, an operator that saves `value` for its backward saves how to `make` it instead.

    Works for any operator, communication included, because nothing of it runs again. The hooks live
    as long as the graph, so they must not hold `value` itself.
    """
    identity = (value.data_ptr(), value.shape)

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        return make if (saved.data_ptr(), saved.shape) == identity else saved

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return packed()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
