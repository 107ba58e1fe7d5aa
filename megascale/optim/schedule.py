"""The learning rate as a pure function of the step.

Convention: `step` counts the updates already applied. Warm-up rises to the peak in `warmup_steps`
updates and its first one is not wasted: step 0 has lr / warmup_steps, step warmup_steps - 1 the
peak. From step warmup_steps (again the peak) the rate falls and reaches its minimum at step
`decay_steps`, where it stays.
"""

from __future__ import annotations

import math

from megascale.config import LrSchedulerConfig


def learning_rate(step: int, cfg: LrSchedulerConfig, *, lr: float, total_steps: int) -> float:
    """Learning rate of update number `step` (from 0) of a run of `total_steps`, with peak `lr`."""
    if step < cfg.warmup_steps:
        return lr * (step + 1) / cfg.warmup_steps
    if cfg.decay_type == "constant":
        return lr
    end = cfg.decay_steps or total_steps
    start = cfg.warmup_steps
    if cfg.decay_type == "wsd":  # stable until the last share of the steps, then linear
        start = max(start, end - round(cfg.decay_ratio * end))
    if step >= end:
        return lr * cfg.min_lr_factor
    progress = max(0.0, (step - start) / (end - start)) if start < end else 0.0
    kept = 1.0 - progress
    if cfg.decay_type == "cosine":
        kept = 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (cfg.min_lr_factor + (1.0 - cfg.min_lr_factor) * kept)
