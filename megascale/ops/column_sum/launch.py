"""Launches of column sums, and how rows are shared between programs.

Constants were chosen by counting, for an H200: a thread has four to eight 16-byte loads in flight,
and programs are many times what fits on the GPU, so that the last wave is short.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megascale.kernels.kernel_call import launch
from megascale.ops.column_sum.kernel import add_partials_kernel, column_sums_kernel

COLUMNS = 256  # a warp reads a row of a tile in 16-byte pieces
ROWS = 32
SUMMED = 64  # rows and columns of a tile of partial sums
MOST_PROGRAMS = 2048


def rows_of_program(num_rows: int, num_blocks: int, tile_rows: int) -> int:
    """Rows that a program takes, whole tiles of `tile_rows`, for `num_blocks` blocks of columns.

    A function of shapes alone: so are the bits of the sums.
    """
    splits = max(1, MOST_PROGRAMS // num_blocks)
    return -(-num_rows // (splits * tile_rows)) * tile_rows


def row_major(x_TN: Tensor) -> Tensor:
    """`x_TN`, copied where its columns do not lie side by side."""
    return x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()


def launch_column_sums(x_TN: Tensor) -> Tensor:
    """The partial sums of the rows of `x_TN`, fp32 [P, N]."""
    x_TN = row_major(x_TN)
    num_rows, num_columns = x_TN.shape
    num_blocks = -(-num_columns // COLUMNS)
    rows_each = rows_of_program(num_rows, num_blocks, ROWS)
    splits = -(-num_rows // rows_each)
    partials_PN = torch.empty(splits, num_columns, dtype=torch.float32, device=x_TN.device)
    launch(
        column_sums_kernel,
        num_blocks * splits,
        {
            "x_ptr": x_TN,
            "partials_ptr": partials_PN,
            "num_rows": num_rows,
            "num_columns": num_columns,
            "row_stride": x_TN.stride(0),
            "rows_each": rows_each,
            "num_blocks": num_blocks,
        },
        {"ROWS": ROWS, "COLUMNS": COLUMNS},
    )
    return partials_PN


def launch_add_partials(out_N: Tensor, partials_PN: Tensor, overwrite: bool) -> None:
    """`out` += the sum of fp32 `partials` over P, or = it."""
    assert out_N.is_contiguous(), out_N.stride()
    num_partials, num_columns = partials_PN.shape
    launch(
        add_partials_kernel,
        -(-num_columns // SUMMED),
        {
            "partials_ptr": partials_PN.contiguous(),
            "out_ptr": out_N,
            "num_partials": num_partials,
            "num_columns": num_columns,
        },
        {"OVERWRITE": overwrite, "ROWS": SUMMED, "COLUMNS": SUMMED},
    )
