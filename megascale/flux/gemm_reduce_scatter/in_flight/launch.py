"""The form "in_flight": one kernel; tiles are added up at their owner (contract: the package).

Legend: W ranks, T rows of all ranks (m), t rows of this rank (c of a full shard), K local
reduction, N columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.gemm_reduce_scatter.in_flight.config import (
    InFlightReduceScatter,
    candidates,
    num_flags,
)
from megascale.flux.gemm_reduce_scatter.one_kernel import OneKernel
from megascale.flux.problem import Layout

if TYPE_CHECKING:
    from megascale.flux.arena import Arena

_KERNEL = OneKernel(
    {"hopper": "in_flight.hopper_launch", "portable": "in_flight.kernel"},
    candidates,
    num_flags,
    slabs=lambda _: 1,
)


def gemm_reduce_scatter(
    x_TK: Tensor,
    weight: Tensor,
    bias_N: Tensor | None,
    arena: Arena,
    *,
    layout: Layout,
    config: InFlightReduceScatter | None = None,
) -> Tensor:
    """y_tN: this rank's rows of the product summed over ranks, plus the bias once.

    All tensors contiguous. `config` None: the default for the problem and the device.
    Raises FluxError where a call of these tiles needs more flags than a slot has.
    """
    return _KERNEL(x_TK, weight, bias_N, arena, layout, config)
