"""The plain form: one all-gather, one GEMM, nothing overlapped."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megascale.flux.call import Call, check_tensors
from megascale.flux.collectives import all_gather, check_rows_of
from megascale.flux.problem import check


def all_gather_gemm(
    x_tI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """(y_TO, gathered x_TI) of this rank's token rows and this rank's weight rows.

    Every rank has equally many rows. FluxError for wrong arguments, before anything is gathered.
    """
    check_tensors(Call("ag_gemm", x_tI, [weight_OI], [bias_O], "NK"))
    check_rows_of(x_tI, group)
    check("ag_gemm", x_tI, [weight_OI], [bias_O], group, "NK")
    x_TI = all_gather(x_tI, group)
    return F.linear(x_TI, weight_OI, bias_O), x_TI
