"""AdamW: Adam with decoupled weight decay on parameters of two axes or more."""

from __future__ import annotations

from torch import Tensor

from megascale.optim.optimizer import Optimizer


class AdamW(Optimizer):
    """Equal to `torch.optim.AdamW` on the unsharded parameters."""

    def _update(self, lr: float | Tensor, found_inf: Tensor) -> None:
        for decay in (True, False):
            places = [i for i, flat in enumerate(self.flats) if flat.decay == decay]
            self._adam(
                places,
                [self.flats[i].master for i in places],
                lr=lr,
                weight_decay=self.cfg.weight_decay if decay else 0.0,
                found_inf=found_inf,
            )
