"""The optimizer's kernels compile for GPUs that are not there: 16 bytes at a time, no spills."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tests.flux.ahead_of_time import TARGETS, compiled
from tests.flux.ptx import usage

pytest.importorskip("triton")

ADAM = {"BETA1": 0.9, "BETA2": 0.95, "EPS": 1e-8, "DECAY": 0.1}
TYPES = {
    "tiles_ptr": "*i64:16",
    "sums_ptr": "*fp64:16",
    "parameters_ptr": "*bf16:16",
    "size": "i64:16",
    "slots": "i32",
}


class Case(NamedTuple):
    """One kernel: its compile-time arguments; vectors that each copy of its block must move.

    loads, stores  of 16 bytes and more a thread in the PTX, at least
    """

    kernel: str
    constants: dict[str, Any]
    loads: int
    stores: int


CASES = [
    Case("adamw_kernel", ADAM, loads=8, stores=7),  # 4 and 3.5 of 32 bytes
    Case("adamw_kernel", ADAM | {"parameters_ptr": None}, loads=8, stores=6),
    Case("squares_kernel", {"ALIGNED": True}, loads=2, stores=0),
    Case("lamb_update_kernel", ADAM | {"ALIGNED": True}, loads=8, stores=6),
    Case("lamb_apply_kernel", {"ALIGNED": True}, loads=4, stores=3),
    Case("lamb_apply_kernel", {"ALIGNED": False}, loads=0, stores=0),
]


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kernel)
def test_the_kernels_compile(case: Case, capability: int) -> None:
    from megascale.optim import kernel
    from megascale.optim.kernel_updates import BLOCK, NUM_WARPS

    function = getattr(kernel, case.kernel)
    constants = case.constants | {"BLOCK": BLOCK}
    types = {n: TYPES.get(n, "*fp32:16") for n in function.arg_names if n not in constants}
    made = compiled(function, types, constants, capability, num_warps=NUM_WARPS)
    text = str(made.asm["ptx"])
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) >= case.loads, text
    assert len(re.findall(r"st\.global\S*\.v4\.b32", text)) >= case.stores, text
    if capability == 90:
        found = usage(made)
        assert found.stack_bytes == 0, found
        # At least 16 warps an SM, whose loads (128 bytes a thread) are 64 KB: the link to memory
        # needs about 23 KB an SM on their way.
        assert found.registers <= 128, found


def test_the_sum_over_tiles_compiles() -> None:
    from megascale.optim import kernel

    types = {"sums_ptr": "*fp64:16", "bounds_ptr": "*i64:16", "out_ptr": "*fp64:16"}
    made = compiled(
        kernel.sum_tiles_kernel, types | {"slots": "i32", "names": "i32"}, {"BLOCK": 1024}, 90
    )
    assert usage(made).stack_bytes == 0
