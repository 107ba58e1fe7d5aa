"""Times of steps without waiting for the device, and the figures of all ranks joined.

On a GPU a mark is a CUDA event on the current stream: nothing is synchronised, so a peer that lets
its host run ahead may do so. A step's time is from its mark to the next.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.result import median_of_timed


class StepClock:
    """Marks of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Before each step, and once after the last."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_s(self) -> list[float]:
        """Seconds of each step; waits for the device."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return [first.elapsed_time(second) / 1e3 for first, second in pairs]
        return [second - first for first, second in pairs]


def memory_gb(device: torch.device) -> tuple[float, float]:
    """(reserved, allocated) at their peak, in 10^9 bytes; zeros on a CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    return (
        torch.cuda.max_memory_reserved(device) / 1e9,
        torch.cuda.max_memory_allocated(device) / 1e9,
    )


def over_ranks(clock: StepClock, losses: list[float], device: torch.device) -> dict[str, Any]:
    """Fields of a `Result` from all ranks; a collective. The slowest and the fullest rank count.

    A rank that has no loss (another pipeline stage) gives an empty list or values below zero.
    """
    step_s = clock.step_s()
    reserved, allocated = memory_gb(device)
    mine = (step_s, median_of_timed(step_s), losses, reserved, allocated)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    steps, medians, all_losses, all_reserved, all_allocated = zip(*everyone, strict=True)
    return {
        "step_s": [max(times) for times in zip(*steps, strict=True)],
        "median_s": max(medians),
        "losses": max(all_losses, key=lambda found: (len(found), found)),
        "peak_reserved_gb": max(all_reserved),
        "peak_allocated_gb": max(all_allocated),
    }
