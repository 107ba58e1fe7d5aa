"""LAMB (MegaScale 3.1; You et al., 1904.00962): Adam's update, scaled to each parameter's norm.

    u = m_hat / (sqrt(v_hat) + eps) + weight_decay * w        w -= lr * (|w| / |u|) * u

The trust ratio |w| / |u| belongs to a logical parameter: both norms are summed over all its shards,
never taken of a rank's slice. It is 1 for parameters of one axis (which do not decay either, so
their update is Adam's) and where a norm is 0; phi is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.optim.optimizer import OnFlat, Optimizer


class Lamb(Optimizer):
    """The update replaces the gradient in its buffer, so LAMB needs no memory of its own. All
    updates precede the first trust ratio; flats are final one by one after that."""

    def _update(self, updated: OnFlat) -> None:
        matrices = [i for i, flat in enumerate(self.flats) if flat.decay]
        for flat in matrices:
            self.updates.lamb_update(flat, self.cfg.weight_decay)
        ratios = self._trust_ratios().to(self.flats[0].master.dtype)
        for flat in range(len(self.flats)):
            if self.flats[flat].decay:
                self.updates.lamb_apply(flat, ratios)
            else:
                self.updates.adamw(flat, 0.0)
            updated(flat)

    def _trust_ratios(self) -> Tensor:
        """|w| / |u| per name of this stage, fp64; meaningful for parameters of two axes."""
        squares = self.norms.over_shards(self.updates.lamb_squares())
        self.norms.share_tied(squares)
        weight, update = squares.sqrt()
        return torch.where((weight > 0) & (update > 0), weight / update, 1.0)
