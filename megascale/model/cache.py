"""Keys and values of the positions so far, for generation. One contiguous tensor a layer.

Tensors are made at the first append, with the head count that arrives: under tensor parallelism a
rank caches its own heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Room for `max_len` positions of each sequence; `length` are filled.

    Layers append the same positions one after another; the chunk then advances `length` once.
    """

    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.length = 0
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}

    def append(self, layer: int, k_BSGH: Tensor, v_BSGH: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all of that layer, `[B, length + S, G, H]`."""
        stop = self.length + k_BSGH.shape[1]
        if stop > self.max_len:
            raise ValueError(f"the cache holds {self.max_len} positions, asked to hold {stop}")
        if layer not in self._stored:
            batch, _, kv_heads, head_dim = k_BSGH.shape
            shape = (2, batch, self.max_len, kv_heads, head_dim)
            both = torch.empty(shape, dtype=k_BSGH.dtype, device=k_BSGH.device)
            self._stored[layer] = (both[0], both[1])
        keys, values = self._stored[layer]
        keys[:, self.length : stop] = k_BSGH
        values[:, self.length : stop] = v_BSGH
        return keys[:, :stop], values[:, :stop]

    def advance(self, num_positions: int) -> None:
        self.length += num_positions
