"""The plain form: one GEMM, one reduce-scatter, nothing overlapped."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascale.flux.call import Call, check_tensors
from megascale.flux.collectives import check_rows_of, reduce_scatter, refuse_uneven_rows
from megascale.flux.problem import check


def gemm_reduce_scatter(x_Ti: Tensor, weight_Oi: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """y_tO: this rank's rows of the summed product. FluxError for wrong arguments, before both."""
    check_tensors(Call("gemm_rs", x_Ti, [weight_Oi], [None], "NK"))
    check_rows_of(x_Ti, group)
    check("gemm_rs", x_Ti, [weight_Oi], [None], group, "NK")
    refuse_uneven_rows(x_Ti, group)
    return reduce_scatter(F.linear(x_Ti, weight_Oi), group)
