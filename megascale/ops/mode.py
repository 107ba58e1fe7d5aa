"""Which implementation an operator runs: the configuration's `operators.mode`, and where it counts.

"fused"  one kernel a pass over memory: Triton for what this package has kernels for, compiled
         chains for the rest, the fastest attention
"plain"  torch's own kernels, one for each operation of a chain, attention by FlashAttention-2: what
         MegaScale's efficient operators (MegaScale 3.3) are measured against

The mode is an argument of every operator that has both, never a state of the process: a layer takes
it from its `ForwardContext`, a tensor-parallel linear from its `TensorOps`. The default is fused.
On CPU, and in fp64 everywhere, both modes run torch's operations: kernels compute in fp32.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from megascale.errors import ConfigError

OperatorMode = Literal["fused", "plain"]

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes_kernels(mode: OperatorMode, *tensors: Tensor | None) -> bool:
    """Whether these tensors go through this package's Triton kernels.

    Raises ConfigError where they should and Triton is not installed.
    """
    if mode != "fused":
        return False
    for tensor in tensors:
        if tensor is not None and not runs_kernels(tensor):
            return False
    if not _has_triton():
        raise ConfigError(
            "operators.mode is 'fused', whose CUDA kernels need Triton, which is not installed; "
            "install megascale[gpu], or set operators.mode = 'plain'"
        )
    return True


def runs_kernels(tensor: Tensor) -> bool:
    """Whether kernels exist for such a tensor; an empty one (a rank without rows) has no grid."""
    return tensor.is_cuda and tensor.numel() > 0 and tensor.dtype in KERNEL_DTYPES


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
