"""Optimizers on sharded fp32 state: AdamW, LAMB, clipping, the learning rate's schedule.

This package sees flat shards cut into named segments (`segments`) and a few reductions handed in
(`norms.Reductions`); it builds no groups and knows neither the model nor the layout.
Invariant: a step never waits for the device. Norms, clipping and the non-finite flag stay there.
"""

from megascale.optim.build import build_optimizer
from megascale.optim.norms import Reductions
from megascale.optim.optimizer import Optimizer, StepResult
from megascale.optim.schedule import learning_rate
from megascale.optim.segments import Flat, Segment

__all__ = [
    "Flat",
    "Optimizer",
    "Reductions",
    "Segment",
    "StepResult",
    "build_optimizer",
    "learning_rate",
]
