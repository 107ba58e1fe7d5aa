"""The price of a pass over device memory: norms, activations, copies, the optimizer."""

from __future__ import annotations

from collections.abc import Iterable

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

    def pass_s(self, memory_pass: MemoryPass, bytes_per_s: float) -> float:
        """Seconds of all kernels of the pass."""
        word = word_in(memory_pass.name, self.shares)
        share = self.share if word is None else self.shares[word]
        return memory_pass.kernels * self.floor_s + memory_pass.num_bytes / (bytes_per_s * share)


def word_in(name: str, words: Iterable[str]) -> str | None:
    """The longest of `words` that `name` contains."""
    return max((word for word in words if word in name), key=len, default=None)
