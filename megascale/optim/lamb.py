"""LAMB (MegaScale 3.1; You et al., 1904.00962): Adam's update, scaled to each parameter's norm.

    u = m_hat / (sqrt(v_hat) + eps) + weight_decay * w        w -= lr * (|w| / |u|) * u

The trust ratio |w| / |u| belongs to a logical parameter: both norms are summed over all its shards,
never taken of a rank's slice. It is 1 for parameters of one axis (which do not decay either) and
where a norm is 0; phi is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megascale.optim.optimizer import Optimizer


class Lamb(Optimizer):
    """The update replaces the gradient in its buffer, so LAMB's extra memory is one flat."""

    def _update(self, lr: float | Tensor, found_inf: Tensor) -> None:
        for i, flat in enumerate(self.flats):
            update = flat.master * (self.cfg.weight_decay if flat.decay else 0.0)
            # A learning rate of -1 makes the fused kernel add m_hat / (sqrt(v_hat) + eps).
            self._adam([i], [update], lr=-1.0, weight_decay=0.0, found_inf=found_inf)
            flat.grad.copy_(update)
        ratios = self._trust_ratios().to(self.flats[0].master.dtype).unbind()
        for flat in self.flats:
            for segment in flat.segments if flat.decay else ():
                segment.grad.mul_(ratios[self.norms.index[segment.name]])
        sgd(  # fused for its mask: bits survive a masked step, which adding 0 does not promise
            [flat.master for flat in self.flats],
            [flat.grad for flat in self.flats],
            [None for _ in self.flats],
            fused=True,
            found_inf=found_inf,
            lr=lr,  # type: ignore[arg-type]  # says float, takes a tensor as adamw does
            weight_decay=0.0,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _trust_ratios(self) -> Tensor:
        """|w| / |u| per name of this stage, fp64; meaningful for parameters of two axes."""
        squares = self.norms.squared("master", "grad")
        self.norms.share_tied(squares)
        weight, update = squares.sqrt()
        return torch.where((weight > 0) & (update > 0), weight / update, 1.0)
