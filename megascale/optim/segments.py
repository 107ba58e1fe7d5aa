"""What an optimizer works on: flat shards, and the named segments that tile them.

Elementwise maths runs on a whole `Flat` (a few large kernels); whatever needs a logical parameter
(its norm, its trust ratio, its name) runs on the `Segment`s, which are views of the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Segment:
    """This rank's piece of one logical parameter.

    name         logical name; a name may have several segments on a rank, or none
    master       1-D view of the master shard (fp32, or fp64 in parity tests)
    grad         1-D view of the reduced main gradient, same length
    decay        the logical parameter has two axes or more: decayed, and has a trust ratio
    replicated   every tensor-parallel rank holds the same values
    tied_copy    second copy of a parameter that another pipeline stage owns
    """

    name: str
    master: Tensor
    grad: Tensor
    decay: bool
    replicated: bool = False
    tied_copy: bool = False


@dataclass
class Flat:
    """A contiguous run of segments with one decay rule; `segments` tile it exactly, in order.

    parameters  1-D view, of the same length, of what the model computes with, where that is not the
                master itself: a step leaves the new master there, rounded
    """

    master: Tensor
    grad: Tensor
    decay: bool
    segments: list[Segment]
    parameters: Tensor | None = None

    def __post_init__(self) -> None:
        sizes = (
            self.master.numel(),
            self.grad.numel(),
            sum(s.master.numel() for s in self.segments),
            sum(s.grad.numel() for s in self.segments),
            self.master.numel() if self.parameters is None else self.parameters.numel(),
        )
        assert len(set(sizes)) == 1, (
            f"master, grad, their segments and parameters differ in size: {sizes}"
        )
        mixed = [s.name for s in self.segments if s.decay != self.decay]
        assert not mixed, f"a flat has one decay rule ({self.decay}); {mixed} have the other"
