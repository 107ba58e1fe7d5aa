"""AdamW: Adam with decoupled weight decay on parameters of two axes or more."""

from __future__ import annotations

from megascale.optim.optimizer import OnFlat, Optimizer


class AdamW(Optimizer):
    """Equal to `torch.optim.AdamW` on the unsharded parameters."""

    def _update(self, updated: OnFlat) -> None:
        for flat in range(len(self.flats)):
            self.updates.adamw(flat, self._decay_of(flat))
            updated(flat)
