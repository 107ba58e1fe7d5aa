"""The next token from the logits of the last position.

Draws are made on the CPU from a generator of the caller's: one seed gives one text on every device
whose logits agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Greedy at temperature 0, else a draw from the `top_k` likeliest (0: from all)."""

    temperature: float
    top_k: int
    generator: torch.Generator

    def __call__(self, logits_V: Tensor) -> int:
        if self.temperature == 0.0:
            return int(logits_V.argmax())
        logits_V = logits_V.float().cpu()
        k = min(self.top_k, len(logits_V)) or len(logits_V)
        kept_k, tokens_k = logits_V.topk(k)
        probabilities_k = torch.softmax(kept_k / self.temperature, dim=-1)
        return int(tokens_k[torch.multinomial(probabilities_k, 1, generator=self.generator)])
