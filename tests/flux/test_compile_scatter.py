"""The Hopper kernel of GEMM + reduce-scatter compiles for a GPU that is not there: what it spills,
and when a tile is announced. Both ways: stored at its owner, and staged for copy engines."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.flux.arena import Slot
from megascale.flux.gemm_config import HOPPER
from megascale.flux.gemm_reduce_scatter.config import FusedReduceScatter, candidates
from megascale.flux.problem import Problem
from tests.flux.ahead_of_time import compiled_gluon
from tests.flux.ptx import always_precede, branching, usage
from tests.flux.test_compile_ahead import SHARED_BYTES

pytest.importorskip("triton")
pytestmark = pytest.mark.full

M, N, K, WORLD = 1024, 776, 520, 4  # columns, reduction: multiples of 8 and not of 16
STORE = r"cp\.async\.bulk\.tensor\.2d\.global\.shared"
WRITTEN = r"cp\.async\.bulk\.wait_group 0"  # not `.read`: that says that shared memory is free
SET_FLAG = r"atom\.global\.sys\.release\.exch"
COUNT = r"atom\.global\.sys\.release\.add"
ENGINE = candidates(Problem("gemm_rs", M, N, K, WORLD, torch.bfloat16, "NK"), HOPPER)[0]


def _kernel(
    config: FusedReduceScatter,
    *,
    staged: bool,
    layout: str = "NK",
    dtype: torch.dtype = torch.bfloat16,
    pair: bool = False,
    deadline_ns: int = 0,
) -> Any:
    """As a launch of this configuration would compile it."""
    from megascale.flux.gemm_reduce_scatter.hopper import gemm_reduce_scatter_hopper
    from megascale.flux.gemm_reduce_scatter.hopper_launch import _arguments, _Operands

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    data = [torch.empty(M * N * 2, dtype=torch.uint8)] * WORLD
    slot = Slot(1, data, [torch.zeros(16, dtype=torch.int32)] * WORLD, torch.device("cpu"))
    report = torch.zeros(8, dtype=torch.int64)
    arena: Any = SimpleNamespace(num_sms=132, deadline_ns=deadline_ns, report=report)
    x, weight, out = empty(M, K), empty(N, K), empty(M // WORLD, N)
    if layout == "KN":
        weight = empty(K, N)
    operands = _Operands(
        x, weight, x, weight, data[1], out, empty(N), slot.data_ptrs, slot.flag_ptrs,
        slot.flags[1], report, out, slot.flags[1],
    )  # fmt: skip
    staging: Any = SimpleNamespace(tiles_a_chunk=3) if staged else None
    _, arguments, constants = _arguments(operands, slot, arena, config, layout, True, pair, staging)
    warps = constants.pop("num_warps")
    return compiled_gluon(gemm_reduce_scatter_hopper, arguments, constants, num_warps=warps)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"layout": "KN"}, {"dtype": torch.float16}, {"pair": True}, {"deadline_ns": 10**9}],
    ids=["NK", "KN", "fp16", "pair", "deadline"],
)
def test_it_fits_and_spills_nothing(options: dict[str, Any], staged: bool) -> None:
    assert ENGINE.engine == "hopper"
    found = usage(_kernel(ENGINE, staged=staged, **options))
    assert found.stack_bytes == 0, found
    assert found.shared_bytes <= SHARED_BYTES[HOPPER], found


@pytest.mark.parametrize("staged", [False, True])
def test_a_tile_is_announced_when_it_is_written(staged: bool) -> None:
    """To the owner by its flag, to this rank's copy stream by the count of its chunk."""
    ptx = branching(_kernel(ENGINE, staged=staged).asm["ptx"])
    announced, other = (COUNT, SET_FLAG) if staged else (SET_FLAG, COUNT)
    assert always_precede(ptx, STORE, WRITTEN, announced)
    assert not re.search(other, ptx)
    unsafe = re.sub(WRITTEN, "cp.async.bulk.wait_group.read 0", ptx)
    assert not always_precede(unsafe, STORE, WRITTEN, announced)
