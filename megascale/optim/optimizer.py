"""What AdamW and LAMB share: moments, clipping by the true global norm, the masked step.

A non-finite norm masks the step on the device: parameters, moments and the step count keep their
bits, and the host reads the flag whenever it likes (one step later, so that it never waits).

A step goes flat by flat in their order and says so (`updated`), so that who sends parameters to
other ranks may send the first while the next are computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megascale.config import OptimizerConfig
from megascale.optim.kernel_updates import KernelUpdates
from megascale.optim.norms import ParameterNorms, Reductions
from megascale.optim.segments import Flat
from megascale.optim.tiles import Tiles
from megascale.optim.updates import Moments, StepScalars, TorchUpdates, Updates

OnFlat = Callable[[int], object]


def _ignore(_flat: int) -> None:
    pass


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step, on the device; reading any of it on the host waits for the step.

    norm        global norm of the scaled gradients before clipping (fp64 scalar)
    found_inf   1.0 where the norm was not finite and the step was masked, else 0.0
    squared     squared gradient norms of this stage's `names`, before scaling
    """

    norm: Tensor
    found_inf: Tensor
    squared: Tensor
    names: tuple[str, ...]

    def name_of_worst(self) -> str | None:
        """First parameter of this stage whose gradient is not finite; None where all are."""
        bad = (~self.squared.isfinite()).nonzero()
        return self.names[int(bad[0])] if len(bad) else None


class Optimizer(ABC):
    """Steps `flats` in place; a subclass says how clipped gradients move the masters.

    A rank passes at least one flat (it may have no elements). `step_count` is a device scalar,
    fp32 because torch's fused kernel wants it so (exact up to 2**24 steps); restore with `copy_`.
    kernels  Triton kernels (fp32 flats) or torch's operations
    """

    def __init__(
        self,
        cfg: OptimizerConfig,
        flats: Sequence[Flat],
        reductions: Reductions,
        *,
        kernels: bool = False,
    ) -> None:
        assert flats, "an optimizer needs at least one flat, if only for its device"
        self.cfg = cfg
        self.flats = list(flats)
        self.norms = ParameterNorms(self.flats, reductions)
        self.exp_avg = [torch.zeros_like(flat.master) for flat in self.flats]
        self.exp_avg_sq = [torch.zeros_like(flat.master) for flat in self.flats]
        self.step_count = torch.zeros((), dtype=torch.float32, device=self.flats[0].master.device)
        moments = Moments(self.exp_avg, self.exp_avg_sq, self.step_count)
        self.updates: Updates
        if kernels:
            tiles = Tiles(self.flats, self.norms.index, self.norms.counts)
            self.updates = KernelUpdates(cfg, self.flats, moments, tiles)
        else:
            norms = self.norms
            self.updates = TorchUpdates(cfg, self.flats, moments, norms.by_torch, norms.index)

    def state(self) -> dict[str, list[Tensor]]:
        """Tensors to checkpoint, each list aligned with the flats; load with `copy_`."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @torch.no_grad()
    def gradient_is_final(self, flat: int) -> None:
        """Optional, before a step: the gradient of flat number `flat` will not change any more, so
        its part of the norm may be computed while others are still under way to this rank."""
        self.updates.gradient_is_final(flat)

    @torch.no_grad()
    def step(
        self, lr: float | Tensor, grad_scale: float | Tensor = 1.0, *, updated: OnFlat = _ignore
    ) -> StepResult:
        """One update. Gradients are multiplied by `grad_scale` first, and used up.

        updated  called with the number of each flat, in order, when its master and parameters are
                 final (on CUDA: for what is launched from then on)
        The step is clipped and masked as one over all ranks, so all of them must call it.
        """
        result, scale = self._measure(grad_scale)
        self.updates.begin(StepScalars(lr, scale, result.found_inf))
        self._update(updated)
        self.step_count.add_(1.0 - result.found_inf)
        return result

    @abstractmethod
    def _update(self, updated: OnFlat) -> None:
        """Move moments and masters of all flats, in order."""

    def _measure(self, grad_scale: float | Tensor) -> tuple[StepResult, Tensor]:
        """Norm, mask, and what gradients are to be multiplied by (fp64)."""
        reductions = self.norms.reductions
        squared = self.norms.over_shards(self.updates.gradient_squares())
        total = squared.sum()
        reductions.sum_over_pipeline(total)
        norm = total.sqrt() * grad_scale
        scale = torch.ones_like(norm) * grad_scale
        if self.cfg.clip_grad > 0:
            scale *= (self.cfg.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        found_inf = norm.isfinite().logical_not().float()
        return StepResult(norm, found_inf, squared, reductions.names), scale

    def _decay_of(self, flat: int) -> float:
        return self.cfg.weight_decay if self.flats[flat].decay else 0.0
