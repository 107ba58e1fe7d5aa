"""From `[optimizer]` to an optimizer. A new one is a module beside `adamw.py` and a row here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale.config import OptimizerConfig
from megascale.ops.mode import takes_kernels
from megascale.optim.adamw import AdamW
from megascale.optim.lamb import Lamb
from megascale.optim.norms import Reductions
from megascale.optim.optimizer import Optimizer
from megascale.optim.segments import Flat

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": AdamW, "lamb": Lamb}


def build_optimizer(
    cfg: OptimizerConfig,
    flats: Sequence[Flat],
    reductions: Reductions,
    *,
    kernels: bool | None = None,
) -> Optimizer:
    """The optimizer that `cfg.name` asks for, with zero moments, on this rank's `flats`.

    kernels  Triton kernels, for fp32 flats; torch's operations; None: kernels on CUDA in fp32
    """
    master = flats[0].master
    if kernels is None:
        kernels = takes_kernels("fused", master)
    return OPTIMIZERS[cfg.name](
        cfg, flats, reductions, kernels=kernels and master.dtype == torch.float32
    )
