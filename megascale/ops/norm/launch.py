"""Launches of the norm's kernels: how a row is cut, and how rows are shared between programs.

Compiled for sm_90, the largest forms without a spilled register: 12288 columns of LayerNorm
backward take all 128 registers of 512 threads. 16384 would spill, so there the bias gradient is
summed by a kernel of its own (`column_sum`).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megascale.kernels.kernel_call import launch
from megascale.ops.column_sum.launch import launch_column_sums
from megascale.ops.norm.kernel import norm_backward_kernel, norm_kernel

MOST_BLOCK = 4096
MOST_CHUNKS_WITH_BIAS = 3
PROGRAMS = 132  # an SM of an H200 each; two each where a row is one block


def cut_of(num_columns: int) -> tuple[int, int, int]:
    """(columns of a block, blocks, warps of a program) for a row."""
    block = min(triton.next_power_of_2(num_columns), MOST_BLOCK)
    chunks = -(-num_columns // block)
    return block, chunks, 16 if chunks > 1 else (8 if block > 1024 else 4)


def launch_forward(
    x_TD: Tensor, branch_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """(sum, norm, mean, 1 / deviation); without a branch the sum is `x`, without a bias no mean."""
    x_TD = x_TD.contiguous()
    num_rows, num_columns = x_TD.shape
    block, chunks, num_warps = cut_of(num_columns)
    y_TD = torch.empty_like(x_TD)
    sum_TD = x_TD if branch_TD is None else torch.empty_like(x_TD)
    rstd_T = torch.empty(num_rows, dtype=torch.float32, device=x_TD.device)
    mean_T = None if bias_D is None else torch.empty_like(rstd_T)
    launch(
        norm_kernel,
        num_rows,
        {
            "x_ptr": x_TD,
            "branch_ptr": None if branch_TD is None else branch_TD.contiguous(),
            "weight_ptr": weight_D.contiguous(),
            "bias_ptr": None if bias_D is None else bias_D.contiguous(),
            "sum_ptr": None if branch_TD is None else sum_TD,
            "y_ptr": y_TD,
            "mean_ptr": mean_T,
            "rstd_ptr": rstd_T,
            "num_columns": num_columns,
        },
        {"EPS": eps, "BLOCK": block, "CHUNKS": chunks, "num_warps": num_warps},
    )
    return sum_TD, y_TD, mean_T, rstd_T


def launch_backward(
    sum_TD: Tensor,
    weight_D: Tensor,
    grad_y_TD: Tensor,
    grad_sum_TD: Tensor | None,
    mean_T: Tensor | None,
    rstd_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gradient of the sum, partial sums of the weight's gradient, of the bias'), fp32 [P, D]."""
    grad_y_TD = grad_y_TD.contiguous()
    num_rows, num_columns = sum_TD.shape
    block, chunks, num_warps = cut_of(num_columns)
    rows_each = -(-num_rows // (PROGRAMS if chunks > 1 else 2 * PROGRAMS))
    programs = -(-num_rows // rows_each)
    grad_TD = torch.empty_like(sum_TD)
    weight_partials_PD = torch.empty(
        programs, num_columns, dtype=torch.float32, device=sum_TD.device
    )
    bias_partials_PD = None
    if mean_T is not None and chunks <= MOST_CHUNKS_WITH_BIAS:
        bias_partials_PD = torch.empty_like(weight_partials_PD)
    launch(
        norm_backward_kernel,
        programs,
        {
            "sum_ptr": sum_TD,
            "weight_ptr": weight_D.contiguous(),
            "grad_y_ptr": grad_y_TD,
            "grad_sum_ptr": None if grad_sum_TD is None else grad_sum_TD.contiguous(),
            "mean_ptr": mean_T,
            "rstd_ptr": rstd_T,
            "grad_ptr": grad_TD,
            "weight_partials_ptr": weight_partials_PD,
            "bias_partials_ptr": bias_partials_PD,
            "num_rows": num_rows,
            "num_columns": num_columns,
            "rows_each": rows_each,
        },
        {"BLOCK": block, "CHUNKS": chunks, "num_warps": num_warps},
    )
    if mean_T is not None and bias_partials_PD is None:
        bias_partials_PD = launch_column_sums(grad_y_TD)
    return grad_TD, weight_partials_PD, bias_partials_PD
