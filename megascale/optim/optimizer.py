"""What AdamW and LAMB share: moments, clipping by the true global norm, the masked step.

A non-finite norm masks the step on the device: parameters, moments and the step count keep their
bits, and the host reads the flag whenever it likes (one step later, so that it never waits).

The Adam maths is torch's fused kernel. Gradients are scaled by a multiplication of their own and
not by the kernel's `grad_scale`, which divides, is fp32 even for fp64 state, and writes the
gradient back all the same (it would save 4 of 39 ms for 3.2e9 parameters on an H200).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megascale.config import OptimizerConfig
from megascale.optim.norms import ParameterNorms, Reductions
from megascale.optim.segments import Flat


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
    fp32 because the fused kernel wants it so (exact up to 2**24 steps); restore with `copy_`.
    """

    def __init__(self, cfg: OptimizerConfig, flats: Sequence[Flat], reductions: Reductions) -> None:
        assert flats, "an optimizer needs at least one flat, if only for its device"
        self.cfg = cfg
        self.flats = list(flats)
        self.norms = ParameterNorms(self.flats, reductions)
        self.exp_avg = [torch.zeros_like(flat.master) for flat in self.flats]
        self.exp_avg_sq = [torch.zeros_like(flat.master) for flat in self.flats]
        self.step_count = torch.zeros((), dtype=torch.float32, device=self.flats[0].master.device)

    def state(self) -> dict[str, list[Tensor]]:
        """Tensors to checkpoint, each list aligned with the flats; load with `copy_`."""
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @torch.no_grad()
    def step(self, lr: float | Tensor, grad_scale: float | Tensor = 1.0) -> StepResult:
        """One update. Gradients are multiplied by `grad_scale` first, and used up.

        The step is clipped and masked as one over all ranks, so all of them must call it.
        """
        result = self._clip(grad_scale)
        self._update(lr, result.found_inf)
        self.step_count.add_(1.0 - result.found_inf)
        return result

    @abstractmethod
    def _update(self, lr: float | Tensor, found_inf: Tensor) -> None:
        """Move moments and masters; change none of them where `found_inf` is 1."""

    def _clip(self, grad_scale: float | Tensor) -> StepResult:
        reductions = self.norms.reductions
        squared = self.norms.squared("grad")[0]
        total = squared.sum()
        reductions.sum_over_pipeline(total)
        norm = total.sqrt() * grad_scale
        scale = torch.ones_like(norm) * grad_scale
        if self.cfg.clip_grad > 0:
            scale *= (self.cfg.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        for flat in self.flats:
            flat.grad.mul_(scale.to(flat.grad.dtype))
        found_inf = norm.isfinite().logical_not().float()
        return StepResult(norm, found_inf, squared, reductions.names)

    def _adam(
        self,
        places: list[int],
        params: list[Tensor],
        *,
        lr: float | Tensor,
        weight_decay: float,
        found_inf: Tensor,
    ) -> None:
        """Adam with decoupled decay on `params`, from the gradients and moments at `places`."""
        if not places:
            return
        # The kernel advances every step tensor that it is given: it gets copies.
        steps = self.step_count.repeat(len(places)).unbind()
        adamw(
            params,
            [self.flats[i].grad for i in places],
            [self.exp_avg[i] for i in places],
            [self.exp_avg_sq[i] for i in places],
            [],
            list(steps),
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            beta1=self.cfg.beta1,
            beta2=self.cfg.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.cfg.eps,
            maximize=False,
        )
