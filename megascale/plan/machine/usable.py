"""What a rank may hold on a device.

A device keeps a reserve for what the prediction does not count (`plan/memory.py`): the allocator's
fragmentation, CUDA's context, NCCL's buffers. Its cluster file says how much, at least 6 %.
"""

from __future__ import annotations

from megascale.plan.machine.device import Device

LEAST_RESERVE = 0.06


def reserve(device: Device) -> float:
    """The share of its memory that stays free."""
    return max(LEAST_RESERVE, device.reserve)


def usable_bytes(device: Device) -> float:
    return device.memory_bytes * (1.0 - reserve(device))
