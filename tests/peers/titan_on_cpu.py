"""Run `benchmarks.peers.titan` on a CPU: the trainer believes that its kind of device is "cpu".

    python -m torch.distributed.run --nproc_per_node 2 -m tests.peers.titan_on_cpu \
        --device cpu --model tiny-llama --tp 2 --gbs 4 --seq 32 --no-async-tp

What stays unproven is what only a GPU has: NCCL, async TP's symmetric memory, cuDNN, memory.
"""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


class _Device:
    """What the trainer asks `torch.cuda` for."""

    def set_device(self, device: Any) -> None: ...

    def get_device_name(self, device: Any) -> str:
        return "cpu"

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: Any) -> SimpleNamespace:
        return SimpleNamespace(total_memory=1 << 30)

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self) -> None: ...

    def memory_stats(self, device: Any) -> dict[str, int]:
        return {}


def _plain_sums(model: torch.nn.Module) -> None:
    """Not divided either; gloo has no sum with a factor, not even with the factor 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def pretend() -> None:
    """Before anything of the trainer is imported: its modules copy these two once."""
    found = torch._utils._get_available_device_type, torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: _Device()  # type: ignore[assignment]
    importlib.import_module("torchtitan.tools.utils")
    torch._utils._get_available_device_type, torch._utils._get_device_module = found
    parallelize = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    vars(parallelize)["disable_fsdp_gradient_division"] = _plain_sums


def main() -> int:
    pretend()
    from benchmarks.peers import titan

    return titan.main()


if __name__ == "__main__":
    sys.exit(main())
