"""The plain form: one GEMM, one reduce-scatter, nothing overlapped."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascale.flux.collectives import reduce_scatter


def gemm_reduce_scatter(x_Ti: Tensor, weight_Oi: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """y_tO: this rank's rows of the summed product."""
    return reduce_scatter(F.linear(x_Ti, weight_Oi), group)
