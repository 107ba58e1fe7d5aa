"""The host beside its device: does it run ahead, when does Python collect garbage, and whose clock
says how long a step took."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from megascale.config import TrainingConfig


class Moment:
    """When the device has done what was launched so far; on a CPU, now.

    A host that runs ahead says little about its device: it has launched most of a step when the
    step before ends, and the last step of a run would seem to take what is left of it. Events cost
    the device nothing, and their differences are exact however long the run.
    """

    def __init__(self, device: torch.device) -> None:
        self.event: torch.cuda.Event | None = None
        self.reached_ns: int | None = None  # monotonic, by a host that was here first
        self._host_s = time.monotonic()
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait(self) -> None:
        """The host waits until the device is there."""
        if self.event is not None and not self.event.query():
            self.event.synchronize()
            self.reached_ns = time.monotonic_ns()

    def seconds_since(self, earlier: Moment) -> float:
        """Both must have passed."""
        if self.event is None or earlier.event is None:
            return self._host_s - earlier._host_s
        return earlier.event.elapsed_time(self.event) / 1e3


def runs_ahead(training: TrainingConfig, device: torch.device) -> bool:
    """Is a step launched before the values of the one before are read? A CPU has done what was
    launched."""
    return device.type == "cuda" and training.run_ahead


@contextmanager
def collections_by(policy: Literal["agreed", "automatic"]) -> Iterator[None]:
    """No collection but at agreed steps: one rank's pause stalls all (MegaScale 6.3)."""
    if policy == "automatic":
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
