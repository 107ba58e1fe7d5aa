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


def fits(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    scalars: int = 0,
) -> None:
    """No spills, and all but `scalars` loads and stores of 16-bit elements in 16-byte pieces."""
    constants = {**constants, **{n: None for n, kind in types.items() if kind == "None"}}
    types = {name: kind for name, kind in types.items() if kind != "None"}
    found = compiled(kernel, types, constants, HOPPER, num_warps=num_warps)
    assert usage(found).stack_bytes == 0, usage(found)
    narrow = re.findall(r"(?:ld|st)\.global\S*\.(?:b16|v2\.b16)\b.*", found.asm["ptx"])
    assert len(narrow) == scalars, narrow


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


@pytest.mark.parametrize("layer_norm", [True, False], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("num_columns", [768, 4096, 5120, 12288, 16384])
def test_norm(num_columns: int, layer_norm: bool) -> None:
    from megascale.ops.norm.kernel import norm_backward_kernel, norm_kernel
    from megascale.ops.norm.launch import MOST_CHUNKS_WITH_BIAS, cut_of

    block, chunks, num_warps = cut_of(num_columns)
    cut = {"BLOCK": block, "CHUNKS": chunks}
    of_layer_norm = "" if layer_norm else "None"
    types = dict.fromkeys(("x_ptr", "branch_ptr", "weight_ptr", "sum_ptr", "y_ptr"), "*bf16:16")
    types |= {"bias_ptr": of_layer_norm or "*bf16:16", "mean_ptr": of_layer_norm or "*fp32:16"}
    types |= {"rstd_ptr": "*fp32:16", "num_columns": WIDE}
    fits(norm_kernel, types, {"EPS": 1e-5, **cut}, num_warps)
    pointers = ("sum_ptr", "weight_ptr", "grad_y_ptr", "grad_sum_ptr", "grad_ptr")
    types = dict.fromkeys(pointers, "*bf16:16") | {"rstd_ptr": "*fp32:16", "num_rows": "i32"}
    sums_bias = layer_norm and chunks <= MOST_CHUNKS_WITH_BIAS
    types |= {"mean_ptr": of_layer_norm or "*fp32:16", "weight_partials_ptr": "*fp32:16"}
    types["bias_partials_ptr"] = "*fp32:16" if sums_bias else "None"
    types |= {"num_columns": WIDE, "rows_each": "i32"}
    fits(norm_backward_kernel, types, cut, num_warps)


def test_cross_entropy() -> None:
    from megascale.ops.cross_entropy.kernel import gradient_kernel, row_statistics_kernel
    from megascale.ops.cross_entropy.launch import BLOCK, NUM_WARPS

    types = {"logits_ptr": "*bf16:16", "labels_ptr": "*i64:16", "statistics_ptr": "*fp32:16"}
    types |= {"num_rows": "i32", "row_stride": WIDE, "num_valid": WIDE, "vocab_start": "i32"}
    fits(row_statistics_kernel, types, {"BLOCK": BLOCK}, NUM_WARPS, scalars=1)
    types = {"logits_ptr": "*bf16:16", "labels_ptr": "*i64:16", "lse_ptr": "*fp32:16"}
    types |= {"scale_ptr": "*fp32:16", "num_columns": WIDE, "row_stride": WIDE}
    types |= {"num_valid": "i32", "vocab_start": "i32", "num_blocks": "i32"}
    fits(gradient_kernel, types, {"BLOCK": BLOCK}, NUM_WARPS)


@pytest.mark.parametrize("head_dim", [80, 128])
@pytest.mark.parametrize("table", ["*fp32:16", "None"])
def test_heads(table: str, head_dim: int) -> None:
    import triton

    from megascale.ops.heads.kernel import join_heads_kernel
    from megascale.ops.heads.launch import TOKENS

    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16:16")
    types |= {"cos_ptr": table, "sin_ptr": table, "out_row_stride": WIDE}
    types |= dict.fromkeys(("num_tokens", "seq_len", "num_q", "num_kv"), "i32")
    types |= dict.fromkeys(("heads_each", "num_blocks"), "i32")
    axes = ("batch", "token", "head")
    types |= {f"{name}_{axis}_stride": WIDE for name in "qkv" for axis in axes}
    width = head_dim if table == "None" else head_dim // 2
    constants = {"HEAD": head_dim, "WIDTH": triton.next_power_of_2(width), "TOKENS": TOKENS}
    for back in (False, True):
        fits(join_heads_kernel, types, {**constants, "BACK": back})
