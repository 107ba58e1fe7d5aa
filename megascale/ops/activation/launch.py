"""Launches of the activation's kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.kernels.kernel_call import launch
from megascale.ops.activation.kernel import activation_backward_kernel, activation_kernel
from megascale.ops.column_sum.launch import COLUMNS, row_major, rows_of_program

FORWARD_ROWS = {"gelu": 16, "gelu_tanh": 16, "swiglu": 8}  # swiglu has two tiles of x
BACKWARD_ROWS = 8  # more take registers, and with them programs, from an SM


def launch_forward(name: str, x_TF: Tensor, bias_F: Tensor | None) -> Tensor:
    """The result, contiguous [T, A]."""
    x_TF = row_major(x_TF)
    num_rows, num_columns = x_TF.shape[0], _num_outputs(name, x_TF)
    y_TA = x_TF.new_empty(num_rows, num_columns)
    num_blocks = -(-num_columns // COLUMNS)
    launch(
        activation_kernel,
        num_blocks * -(-num_rows // FORWARD_ROWS[name]),
        {
            "x_ptr": x_TF,
            "bias_ptr": None if bias_F is None else bias_F.contiguous(),
            "y_ptr": y_TA,
            "num_rows": num_rows,
            "num_columns": num_columns,
            "row_stride": x_TF.stride(0),
            "num_blocks": num_blocks,
        },
        {"ACT": name, "ROWS": FORWARD_ROWS[name], "COLUMNS": COLUMNS},
    )
    return y_TA


def launch_backward(
    name: str,
    x_TF: Tensor,
    bias_F: Tensor | None,
    grad_TA: Tensor,
    grad_x_TF: Tensor,
    *,
    sum_rows: bool,
) -> Tensor | None:
    """Write the gradient of x. With `sum_rows` returns the partial sums of its rows, [P, F]."""
    x_TF, grad_TA = row_major(x_TF), row_major(grad_TA)
    assert grad_x_TF.stride(1) == 1, grad_x_TF.stride()
    num_rows, num_columns = x_TF.shape[0], _num_outputs(name, x_TF)
    num_blocks = -(-num_columns // COLUMNS)
    rows_each = rows_of_program(num_rows, num_blocks, BACKWARD_ROWS)
    splits = -(-num_rows // rows_each)
    partials_PF = None
    if sum_rows:
        partials_PF = torch.empty(splits, x_TF.shape[1], dtype=torch.float32, device=x_TF.device)
    launch(
        activation_backward_kernel,
        num_blocks * splits,
        {
            "x_ptr": x_TF,
            "bias_ptr": None if bias_F is None else bias_F.contiguous(),
            "grad_ptr": grad_TA,
            "grad_x_ptr": grad_x_TF,
            "partials_ptr": partials_PF,
            "num_rows": num_rows,
            "num_columns": num_columns,
            "row_stride": x_TF.stride(0),
            "grad_row_stride": grad_TA.stride(0),
            "grad_x_row_stride": grad_x_TF.stride(0),
            "rows_each": rows_each,
            "num_blocks": num_blocks,
        },
        {"ACT": name, "ROWS": BACKWARD_ROWS, "COLUMNS": COLUMNS},
    )
    return partials_PF


def _num_outputs(name: str, x_TF: Tensor) -> int:
    return x_TF.shape[1] // 2 if name == "swiglu" else x_TF.shape[1]
