"""A stand-in for Apex's `fused_weight_gradient_mlp_cuda`, which Megatron-Core imports by this name
and without which it refuses `gradient_accumulation_fusion`.

Apex's kernel is one call of cuBLAS: bf16 in, fp32 accumulated in place. torch has the same call, so
the peer loses nothing by Apex's absence here. Rows say which of the two a run had.
"""

from __future__ import annotations

import importlib.util
import sys
import types

import torch
from torch import Tensor

MODULE = "fused_weight_gradient_mlp_cuda"


def offer() -> None:
    """Put the stand-in where Megatron looks; before megatron-core is imported: it looks once.

    Apex's own is left in place where it is installed.
    """
    if MODULE in sys.modules or importlib.util.find_spec(MODULE) is not None:
        return
    assert "megatron.core" not in sys.modules, "megatron-core has looked for Apex already"
    module = types.ModuleType(MODULE)
    module.wgrad_gemm_accum_fp32 = accumulate  # type: ignore[attr-defined]
    sys.modules[MODULE] = module


def accumulate(x_TI: Tensor, grad_y_TO: Tensor, main_grad_OI: Tensor) -> None:
    """`main_grad_OI += grad_y_TO^T x_TI` in fp32. Legend: T tokens, I in, O out."""
    if main_grad_OI.is_cuda:
        torch.addmm(main_grad_OI, grad_y_TO.t(), x_TI, out_dtype=torch.float32, out=main_grad_OI)
    else:
        main_grad_OI.addmm_(grad_y_TO.t().float(), x_TI.float())
