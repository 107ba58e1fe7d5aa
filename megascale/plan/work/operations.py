"""The vocabulary of work: matrix products, attention, passes over memory, collectives.

An operation has sizes and no time; a `Cluster` prices it. Sizes are those of one device.
Which products a collective may hide behind is said here by names: whether it does is `Software`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from megascale.units import window_share


class Direction(StrEnum):
    """Which of a linear's three products; GPUs run them at different rates."""

    FORWARD = "forward"
    DGRAD = "dgrad"  # gradient of the input
    WGRAD = "wgrad"  # gradient of the weights, added to fp32 main gradients


class Transfer(StrEnum):
    """What a group of devices does together."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    SEND = "send"


Axis = Literal["tensor", "data", "pipeline", "embedding"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """rows x depth times depth x columns, as this product runs it (wgrad: rows are of the weight).

    2 * rows * columns * depth FLOPs.
    """

    name: str
    rows: int
    columns: int
    depth: int
    direction: Direction
    dtype_bytes: int = 2

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention core of `heads` query heads over `sequences` sequences, causal.

    window  tokens a query sees, itself included; None: all before it
    plain   the library's attention of plain operators, where a machine's file knows the difference
    """

    name: str
    sequences: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    backward: bool
    plain: bool = False

    @property
    def flops(self) -> float:
        """By the full convention, twice as many backward; a window counts the pairs it keeps."""
        pairs = self.seq_len**2 * window_share(self.seq_len, self.window)
        forward = 4.0 * self.sequences * self.heads * self.head_dim * pairs
        return 2.0 * forward if self.backward else forward


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """A pass of `kernels` kernels that together read and write `num_bytes` of device memory."""

    name: str
    num_bytes: float
    kernels: int = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """A transfer among the devices of one axis.

    num_bytes  of the whole tensor: what an all-gather ends with, what a reduce-scatter begins with
    under      the Gemm that reads what it gathers, or makes what it reduces: it hides there only
               where both are cut in pieces (chunks, or Flux's tiles)
    beside     a Gemm that has nothing to do with it: it hides there as it is
    """

    name: str
    transfer: Transfer
    num_bytes: float
    axis: Axis
    under: str | None = None
    beside: str | None = None


Operation = Gemm | Attention | MemoryPass | Collective
Work = tuple[Operation, ...]
