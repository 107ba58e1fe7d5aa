"""The price of a pass over device memory: norms, activations, copies, the optimizer."""

from __future__ import annotations

from pydantic import Field

from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import MemoryPass


class MemoryCurve(Sourced):
    """Shares of the device's memory bandwidth; `shares` by a word in the name of the pass."""

    share: float = Field(gt=0.0, le=1.0, description="of the bandwidth, by a large pass")
    shares: dict[str, float] = Field(
        default={}, description="the same for passes whose name has this word, such as adamw"
    )
    floor_s: float = Field(ge=0.0, description="of a kernel, however few its bytes")

    def share_of(self, name: str) -> float:
        """That of the longest word found in `name`, else the common one."""
        words = [word for word in self.shares if word in name]
        return self.shares[max(words, key=len)] if words else self.share

    def pass_s(self, memory_pass: MemoryPass, bytes_per_s: float) -> float:
        share = self.share_of(memory_pass.name)
        return memory_pass.kernels * self.floor_s + memory_pass.num_bytes / (bytes_per_s * share)
