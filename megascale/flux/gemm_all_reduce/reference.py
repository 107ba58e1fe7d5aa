"""The plain form: one GEMM, one all-reduce, nothing overlapped."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def gemm_all_reduce(
    x_Ti: Tensor, weight_Oi: Tensor, bias_O: Tensor | None, group: dist.ProcessGroup | None
) -> Tensor:
    """y_TO: the product summed over ranks, plus the bias once."""
    y_TO = F.linear(x_Ti, weight_Oi)
    if group is not None:
        dist.all_reduce(y_TO, group=group)
    return y_TO if bias_O is None else y_TO + bias_O
