"""The operators' kernels compile for a Hopper GPU that is not there: they spill nothing, and move
memory in 16-byte pieces."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.flux.ahead_of_time import compiled
from tests.flux.ptx import usage

pytest.importorskip("triton")
pytestmark = pytest.mark.full

HOPPER = 90
WIDE = "i32:16"  # an integer that 16 divides
ACTIVATIONS = pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "swiglu"])


def fits(kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int = 4) -> None:
    """No spills, and no load or store of 16-bit elements that is not in 16-byte pieces."""
    constants = {**constants, **{n: None for n, kind in types.items() if kind == "None"}}
    types = {name: kind for name, kind in types.items() if kind != "None"}
    found = compiled(kernel, types, constants, HOPPER, num_warps=num_warps)
    assert usage(found).stack_bytes == 0, usage(found)
    narrow = re.findall(r"(?:ld|st)\.global\S*\.(?:b16|v2\.b16)\b.*", found.asm["ptx"])
    assert not narrow, narrow


@ACTIVATIONS
@pytest.mark.parametrize("bias", ["*bf16:16", "None"])
def test_activation(name: str, bias: str) -> None:
    from megascale.ops.activation.kernel import activation_kernel
    from megascale.ops.activation.launch import FORWARD_ROWS
    from megascale.ops.column_sum.launch import COLUMNS

    types = {"x_ptr": "*bf16:16", "bias_ptr": bias, "y_ptr": "*bf16:16", "num_rows": "i32"}
    types |= {"num_columns": WIDE, "row_stride": WIDE, "num_blocks": "i32"}
    fits(activation_kernel, types, {"ACT": name, "ROWS": FORWARD_ROWS[name], "COLUMNS": COLUMNS})


@ACTIVATIONS
@pytest.mark.parametrize("bias", ["*bf16:16", "None"])
def test_activation_backward(name: str, bias: str) -> None:
    from megascale.ops.activation.kernel import activation_backward_kernel
    from megascale.ops.activation.launch import BACKWARD_ROWS
    from megascale.ops.column_sum.launch import COLUMNS

    pointers = ("x_ptr", "grad_ptr", "grad_x_ptr")
    sizes = ("num_columns", "row_stride", "grad_row_stride", "grad_x_row_stride")
    types = dict.fromkeys(pointers, "*bf16:16") | dict.fromkeys(sizes, WIDE)
    types |= {"num_rows": "i32", "rows_each": "i32", "num_blocks": "i32", "bias_ptr": bias}
    types["partials_ptr"] = "None" if bias == "None" else "*fp32:16"
    constants = {"ACT": name, "ROWS": BACKWARD_ROWS, "COLUMNS": COLUMNS}
    fits(activation_backward_kernel, types, constants)


def test_column_sums() -> None:
    from megascale.ops.column_sum.kernel import add_partials_kernel, column_sums_kernel
    from megascale.ops.column_sum.launch import COLUMNS, ROWS, SUMMED

    types = {"x_ptr": "*bf16:16", "partials_ptr": "*fp32:16", "num_rows": "i32"}
    types |= {"num_columns": WIDE, "row_stride": WIDE, "rows_each": "i32", "num_blocks": "i32"}
    fits(column_sums_kernel, types, {"ROWS": ROWS, "COLUMNS": COLUMNS})
    types = {"partials_ptr": "*fp32:16", "out_ptr": "*fp32:16", "num_partials": "i32"}
    types["num_columns"] = WIDE
    for overwrite in (False, True):
        constants = {"OVERWRITE": overwrite, "ROWS": SUMMED, "COLUMNS": SUMMED}
        fits(add_partials_kernel, types, constants)
