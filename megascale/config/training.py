"""`[training]`, `[optimizer]`, `[lr_scheduler]`: batches, steps, precision, updates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megascale.config.base import Section


class BatchRampUp(Section):
    """Global batch grows from `start` by `increment` until the final size, over `samples`."""

    start: int = Field(ge=1)
    increment: int = Field(ge=1)
    samples: int = Field(ge=1)


class TrainingConfig(Section):
    """Batches in sequences, lengths in tokens."""

    micro_batch_size: int = Field(1, ge=1)
    global_batch_size: int = Field(8, ge=1)
    batch_ramp_up: BatchRampUp | None = None
    seq_len: int = Field(256, ge=2)
    steps: int = Field(100, ge=0)
    dtype: Literal["bfloat16", "float32", "float64"] = Field(
        "float32", description="parameters and compute; bfloat16 keeps fp32 master weights"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = Field(1234, ge=0, lt=2**63)
    gc: Literal["agreed", "automatic"] = Field(
        "agreed",
        description="garbage collections at agreed steps (MegaScale 6.3), or when Python likes",
    )
    gc_freq: int = Field(50, ge=1, description="steps between agreed collections, on all ranks")
    run_ahead: bool = Field(
        True,
        description="launch a step before the values of the one before are read; false: the host "
        "waits for each step's loss",
    )
    nonfinite_policy: Literal["skip", "stop", "rollback"] = Field(
        "skip", description="a step with a non-finite gradient norm is never applied; then: ..."
    )
    max_nonfinite_steps: int = Field(
        5, ge=1, description="stop after this many in a row, whatever the policy"
    )

    @model_validator(mode="after")
    def _ramp_reaches_the_batch(self) -> TrainingConfig:
        ramp = self.batch_ramp_up
        if ramp is None:
            return self
        rise = self.global_batch_size - ramp.start
        if rise < 0 or rise % ramp.increment:
            raise ValueError(
                f"training.batch_ramp_up goes from {ramp.start} by {ramp.increment} and misses "
                f"training.global_batch_size {self.global_batch_size}; make the difference a "
                "positive multiple of increment"
            )
        return self

    def global_batch_at(self, consumed_samples: int) -> int:
        """Global batch size once `consumed_samples` sequences have been trained on."""
        ramp = self.batch_ramp_up
        if ramp is None:
            return self.global_batch_size
        num_increments = (self.global_batch_size - ramp.start) // ramp.increment
        if num_increments == 0 or consumed_samples >= ramp.samples:
            return self.global_batch_size
        samples_each = ramp.samples / num_increments
        size = ramp.start + ramp.increment * int(consumed_samples / samples_each)
        return min(size, self.global_batch_size)

    def batch_sizes(self) -> list[int]:
        """Every global batch size that the run will use, ascending."""
        ramp = self.batch_ramp_up
        if ramp is None:
            return [self.global_batch_size]
        return list(range(ramp.start, self.global_batch_size + 1, ramp.increment))


class OptimizerConfig(Section):
    """AdamW or LAMB (MegaScale 3.1) on fp32 master shards."""

    name: Literal["adamw", "lamb"] = "adamw"
    lr: float = Field(3e-4, gt=0.0)
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.1, ge=0.0, description="never on one-dimensional parameters")
    clip_grad: float = Field(1.0, ge=0.0, description="global gradient norm; 0: no clipping")


class LrSchedulerConfig(Section):
    """Warm-up, then a decay; all lengths in optimizer steps."""

    warmup_steps: int = Field(0, ge=0)
    decay_type: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    decay_steps: int | None = Field(
        None, ge=1, description="step at which the minimum is reached; None: training.steps"
    )
    decay_ratio: float = Field(
        0.1, gt=0.0, le=1.0, description="wsd: the share of steps spent decaying at the end"
    )
    min_lr_factor: float = Field(0.1, ge=0.0, le=1.0)
