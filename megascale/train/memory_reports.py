"""Every rank's peak memory, every so many steps: who grows, and who is full (MegaScale 5).

The log line knows the writing rank's alone, and the incident at a run's end comes too late for the
rank that ran out before. It asks the allocator on the host, and never waits for the device.
"""

from __future__ import annotations

import torch

from megascale.telemetry.hooks import Hook
from megascale.telemetry.recorder import Recorder
from megascale.train.report import memory


class MemoryReports(Hook):
    """Of the rank that `recorder` records, as an incident "resources" (`telemetry/readers/memory`
    reads them)."""

    def __init__(self, recorder: Recorder, device: torch.device, interval: int) -> None:
        self._recorder, self._device, self._interval = recorder, device, interval

    def on_step_end(self, step: int) -> None:
        if step % self._interval == 0:
            self._recorder.incident("resources", step=step, **memory(self._device))
