"""The host beside its device: does it run ahead, and when does Python collect garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from megascale.config import TrainingConfig


def runs_ahead(training: TrainingConfig, device: torch.device) -> bool:
    """Is a step launched before the values of the one before are read? A CPU has done what was
    launched."""
    return device.type == "cuda" and training.run_ahead


@contextmanager
def collections_by(policy: Literal["agreed", "automatic"]) -> Iterator[None]:
    """No collection but at agreed steps: one rank's pause stalls all (MegaScale 6.3)."""
    if policy == "automatic":
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
