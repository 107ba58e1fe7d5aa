"""Small models with values, for the tests of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.model.initialise import initialise
from megascale.model.transformer import TransformerChunk


def tiny(preset: str, **changes: Any) -> ModelConfig:
    """A tiny preset with two layers, and larger initial values so that differences show."""
    return ModelConfig(preset=preset, **{"num_layers": 2, "init_std": 0.08, **changes})


def build(
    cfg: ModelConfig, num_positions: int = 64, dtype: torch.dtype = torch.float64, seed: int = 0
) -> TransformerChunk:
    """The whole model, with norms and biases moved off their initial ones and zeros."""
    layers = range(cfg.num_layers)
    model = TransformerChunk(
        cfg, layers, embed=True, head=True, num_positions=num_positions, dtype=dtype
    )
    initialise(model, cfg, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.1 * noise.to(dtype))
    return model


def random_tokens(cfg: ModelConfig, batch: int, seq_len: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(cfg.vocab, (batch, seq_len), generator=generator)
