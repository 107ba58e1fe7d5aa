"""What is compared, and by which rule two losses are equal. Written down before any run.

Every run sees the same number of tokens of the same corpus (two epochs), in an order that its seed
draws, from initial values that its seed draws. The baseline's seeds say how far such losses lie
apart by chance. A variant is equal where

    |mean(variant) - mean(baseline)| <= 2 pooled standard deviations

of the final validation loss. Learning rates are chosen by runs of another seed, one for each rate,
for AdamW and for LAMB alike; the baseline's rate is also that of the other blocks.

LAMB's batch is four times as large, its steps are a quarter. Its warm-up is the same share of the
run; its rate is searched around `_LAMB_RATES`, since a step of LAMB moves a matrix by its own norm
times the rate, whatever the batch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STEPS, BATCH, WARM_UP, VALIDATIONS = 1056, 32, 100, 8
PILOT_SEED = 900
_ADAMW_RATES = (5e-4, 1e-3, 2e-3)
_LAMB_RATES = (5e-3, 1e-2, 2e-2)
SPREADS = 2.0  # pooled standard deviations


@dataclass(frozen=True)
class Variant:
    """seeds      of its runs
    overrides  of the recipe
    batch      times the baseline's
    """

    name: str
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    batch: int = 1
    optimizer: str = "adamw"

    def settings(self, seed: int, rate: float) -> list[str]:
        """Everything that a run of it sets."""
        steps = STEPS // self.batch
        return [
            *self.overrides,
            f"optimizer.name={self.optimizer}",
            f"optimizer.lr={rate}",
            f"training.seed={seed}",
            f"training.steps={steps}",
            f"training.global_batch_size={BATCH * self.batch}",
            f"lr_scheduler.warmup_steps={WARM_UP // self.batch}",
            f"validation.interval={steps // VALIDATIONS}",
            f"validation.batches={16 // self.batch}",
        ]


WINDOW = "model.attention_window=256"
PARALLEL = "model.block=parallel"
BASELINE = Variant("serial, full attention, AdamW", (1, 2, 3, 4))
VARIANTS = (
    BASELINE,
    Variant("parallel block", (1, 2), (PARALLEL,)),
    Variant("parallel block, window 256", (1, 2), (PARALLEL, WINDOW)),
    Variant("LAMB, batch x 4", (1, 2), batch=4, optimizer="lamb"),
)
PILOTS = {
    "adamw": (Variant("AdamW", (PILOT_SEED,)), _ADAMW_RATES),
    "lamb": (Variant("LAMB x 4", (PILOT_SEED,), batch=4, optimizer="lamb"), _LAMB_RATES),
}


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float:
    """Of several sets of losses about their own means. At least one has two."""
    freedom = sum(len(group) - 1 for group in groups)
    assert freedom > 0, groups
    squares = sum((value - statistics.mean(group)) ** 2 for group in groups for value in group)
    return float((squares / freedom) ** 0.5)


@dataclass(frozen=True)
class Verdict:
    """difference  of the means, nats; allowed: `SPREADS` pooled deviations"""

    difference: float
    allowed: float

    @property
    def is_equal(self) -> bool:
        return abs(self.difference) <= self.allowed


def compare(variant: Sequence[float], baseline: Sequence[float]) -> Verdict:
    """Final validation losses of a variant's seeds against the baseline's."""
    difference = statistics.mean(variant) - statistics.mean(baseline)
    return Verdict(difference, SPREADS * pooled_deviation([variant, baseline]))
