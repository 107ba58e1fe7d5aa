"""The logical parameters of a model and their shapes, from the configuration alone.

Checkpoints, the optimizer and Hugging Face speak of these names, whatever storage fuses them. The
table itself is in `plan.parameters`, where the planner reads it without torch; the tests hold the
modules here to it.
"""

from __future__ import annotations

from megascale.config import ModelConfig
from megascale.plan.parameters import model_parameters


def logical_parameters(cfg: ModelConfig, num_positions: int) -> dict[str, tuple[int, ...]]:
    """Name to global shape (vocabulary unpadded), in the order of the forward pass."""
    return {p.name: p.shape for p in model_parameters(cfg, num_positions)}
