"""The output head as a module of its own, for layouts that split it over pipeline stages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megascale.config import ModelConfig
from megascale.model.layers import FusedLinear


class OutputHead(nn.Module):
    """Hidden states behind the final norm to logits; module path and names as in the last chunk."""

    def __init__(
        self,
        cfg: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        blocks = (("head", cfg.vocab),)
        self.head = FusedLinear(cfg.hidden_size, blocks, False, torch.device(device), dtype)
        self.before_unit: Callable[[str, Tensor], Tensor] = lambda _name, x: x

    def forward(self, x_tD: Tensor) -> Tensor:
        logits_TV: Tensor = self.head(self.before_unit("head", x_tD))
        return logits_TV

    def units(self) -> list[tuple[str, list[str]]]:
        """(unit name, module paths), as of a chunk."""
        return [("head", ["head"])]
