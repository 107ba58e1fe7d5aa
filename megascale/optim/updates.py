"""The maths of a step on flats: what `AdamW` and `Lamb` compose, in torch and in kernels.

`Updates` says what there is to do; `TorchUpdates` does it with torch's fused optimizers and is the
reference: on CPU, in fp64, and where `operators.mode` asks for plain operators.
`kernel_updates.KernelUpdates` does the same in one pass over memory each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megascale.config import OptimizerConfig
from megascale.optim.segments import Flat


@dataclass(frozen=True)
class Moments:
    """State of a rank: a tensor for each flat, and the device's count of updates (fp32 scalar)."""

    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]
    step_count: Tensor


@dataclass(frozen=True)
class StepScalars:
    """What a step has decided, on the device.

    lr         learning rate
    scale      of the gradients: the caller's and clipping's (fp64)
    found_inf  1.0 where nothing may change (fp32)
    """

    lr: float | Tensor
    scale: Tensor
    found_inf: Tensor


class Updates(Protocol):
    """In every step: the squares of the gradients, `begin`, then updates of flats. None of these
    waits for the device, or changes a bit where `found_inf` is 1."""

    def gradient_is_final(self, flat: int) -> None:
        """The gradient of a flat will not change before `begin`: work on it may start."""

    def gradient_squares(self) -> Tensor:
        """Sums of squares of this rank's gradients by logical name, fp64 [names]."""

    def begin(self, scalars: StepScalars) -> None: ...

    def adamw(self, flat: int, weight_decay: float) -> None:
        """One AdamW update of a flat: moments, master, parameters."""

    def lamb_update(self, flat: int, weight_decay: float) -> None:
        """Moments, and in the place of the gradient LAMB's update before its trust ratio."""

    def lamb_squares(self) -> Tensor:
        """Sums of squares of masters and updates by name, fp64 [2, names]; meaningful for names
        whose flats had their `lamb_update`."""

    def lamb_apply(self, flat: int, ratios: Tensor) -> None:
        """master -= lr * ratio * update, `ratios` [names] by logical name; parameters."""


class SegmentSquares(Protocol):
    def __call__(self, attribute: Literal["master", "grad"]) -> Tensor: ...


class TorchUpdates:
    """By torch's fused optimizers.

    Gradients are scaled by a multiplication of their own and not by their `grad_scale`, which
    divides, is fp32 even for fp64 state, and writes the gradient back all the same.
    """

    def __init__(
        self,
        cfg: OptimizerConfig,
        flats: Sequence[Flat],
        moments: Moments,
        squares: SegmentSquares,
        index: dict[str, int],
    ) -> None:
        self.cfg, self.flats, self.moments = cfg, flats, moments
        self._squares, self._index = squares, index

    def gradient_is_final(self, flat: int) -> None:
        """Squares are summed in one go."""

    def gradient_squares(self) -> Tensor:
        return self._squares("grad")

    def begin(self, scalars: StepScalars) -> None:
        self._scalars = scalars
        for flat in self.flats:
            flat.grad.mul_(scalars.scale.to(flat.grad.dtype))

    def adamw(self, flat: int, weight_decay: float) -> None:
        self._adam(flat, self.flats[flat].master, self._scalars.lr, weight_decay)
        self._round(flat)

    def lamb_update(self, flat: int, weight_decay: float) -> None:
        update = self.flats[flat].master * weight_decay
        # A learning rate of -1 makes the fused kernel add m_hat / (sqrt(v_hat) + eps).
        self._adam(flat, update, -1.0, 0.0)
        self.flats[flat].grad.copy_(update)

    def lamb_squares(self) -> Tensor:
        return torch.stack([self._squares("master"), self._squares("grad")])

    def lamb_apply(self, flat: int, ratios: Tensor) -> None:
        of = self.flats[flat]
        by_name = ratios.to(of.master.dtype).unbind()
        for segment in of.segments:
            segment.grad.mul_(by_name[self._index[segment.name]])
        sgd(  # fused for its mask: bits survive a masked step, which adding 0 does not promise
            [of.master],
            [of.grad],
            [None],
            fused=True,
            found_inf=self._scalars.found_inf,
            lr=self._scalars.lr,  # type: ignore[arg-type]  # says float, takes a tensor as adamw does
            weight_decay=0.0,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self._round(flat)

    def _adam(self, flat: int, values: Tensor, lr: float | Tensor, weight_decay: float) -> None:
        """Adam with decoupled decay on `values`, from the gradient and moments of `flat`."""
        adamw(
            [values],
            [self.flats[flat].grad],
            [self.moments.exp_avg[flat]],
            [self.moments.exp_avg_sq[flat]],
            [],
            [self.moments.step_count.clone()],  # the kernel advances what it is given
            fused=True,
            found_inf=self._scalars.found_inf,
            amsgrad=False,
            beta1=self.cfg.beta1,
            beta2=self.cfg.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.cfg.eps,
            maximize=False,
        )

    def _round(self, flat: int) -> None:
        parameters = self.flats[flat].parameters
        if parameters is not None:
            parameters.copy_(self.flats[flat].master)
