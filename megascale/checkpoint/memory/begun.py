"""A save whose values are in its slot, or on their way there, and what becomes of it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from megascale.checkpoint.memory.slot import Slot, Stamp
from megascale.errors import CheckpointError


@dataclass(frozen=True)
class Begun:
    """copied   the copy from the device; None: it is done
    hashed   of the values; None: nobody hashes them yet
    outcome  None once the step is settled, an error where it never will be
    """

    slot: Slot
    stamp: Stamp
    copied: torch.cuda.Event | None
    hashed: Future[str] | None = None
    outcome: Future[None] = field(default_factory=Future)

    def wait(self) -> None:
        """Until the values are there and count. Raises CheckpointError where they never will."""
        self.outcome.result()
        if self.copied is not None:
            self.copied.synchronize()

    def void(self, why: str) -> None:
        """The step is not settled, and will not be."""
        step = self.stamp.step
        self.outcome.set_exception(CheckpointError(f"step {step} was not kept: {why}"))
