"""A checkpoint's weights as a whole model on one device, whatever layout trained it.

On CUDA the model is bf16, as it is trained there; on the CPU fp32, where bf16 is slower. Memory is
the model and one parameter: masters are read one at a time.
"""

from __future__ import annotations

import torch

from megascale.checkpoint.saved_model import SavedModel
from megascale.model.initialise import logical_tensors
from megascale.model.transformer import TransformerChunk


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(saved: SavedModel, device: torch.device) -> TransformerChunk:
    """The whole model in evaluation form: no dropout, no gradients kept."""
    cfg = saved.model
    model = TransformerChunk(
        cfg,
        range(cfg.num_layers),
        embed=True,
        head=True,
        num_positions=saved.num_positions,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    for name, storage in logical_tensors(model).items():
        master = saved.parameter(name)
        assert master.shape == storage.shape, (name, master.shape, storage.shape)
        storage.copy_(master)
    return model.requires_grad_(False)
