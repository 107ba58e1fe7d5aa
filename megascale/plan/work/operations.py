"""The vocabulary of work: matrix products, attention, passes over memory, collectives.

An operation has sizes and no time; a `Cluster` prices it. Sizes are those of one device.
`under` names the matrix product that a collective may hide behind: whether it does is `Software`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


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
    """

    name: str
    sequences: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    backward: bool


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
    under      name of the Gemm beside it that it may hide behind; None: nothing to hide behind
    """

    name: str
    transfer: Transfer
    num_bytes: float
    axis: Axis
    under: str | None = None


Operation = Gemm | Attention | MemoryPass | Collective
Work = tuple[Operation, ...]
