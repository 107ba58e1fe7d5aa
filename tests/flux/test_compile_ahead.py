"""The portable kernels compile for GPUs that are not there: order of their instructions, spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale.flux.all_gather_gemm.config import candidates as gather_candidates
from megascale.flux.gemm_config import HOPPER, GemmConfig
from megascale.flux.gemm_reduce_scatter.config import candidates as scatter_candidates
from megascale.flux.problem import Problem
from tests.flux.ahead_of_time import compiled
from tests.flux.ptx import always_precede, usage

pytest.importorskip("triton")

AMPERE = (8, 0)
SHARED_BYTES = {HOPPER: 227 * 1024, AMPERE: 163 * 1024}  # of a program

STORE_TILE = r"st\.global\.v4"
BARRIER = r"bar\.sync"
SET_FLAG = r"atom\.global\.sys\.release\.exch"
READ_FLAG = r"ld\.acquire\.sys\.global\.b32"
CLEAR_FLAG = r"st\.global\.b32"


def _types(config: GemmConfig, layout: str, *, tma: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """(types, constants) of what both kernels have."""
    bf16 = "*bf16:16"
    types = {
        "weight_ptr": bf16,
        "bias_ptr": bf16,
        "out_ptr": bf16,
        "report_ptr": "*i64:16",
        "m": "i32",
        "n": "i32:16",
        "k": "i32:16",
        "rows": "i32",
        "rank": "i32",
    }
    constants: dict[str, Any] = {
        "WORLD": 2,
        "NK": layout == "NK",
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "DEADLINE_NS": 0,
    }
    if tma:
        b = (config.block_n, config.block_k) if layout == "NK" else (config.block_k, config.block_n)
        types["weight_desc"] = f"tensordesc<bf16[{b[0]},{b[1]}]>"
    else:
        constants["weight_desc"] = None
    return types, constants


def scatter(config: GemmConfig, capability: tuple[int, int], layout: str = "NK") -> Any:
    from megascale.flux.gemm_reduce_scatter.kernel import gemm_reduce_scatter_kernel

    tma = config.tma and capability >= HOPPER
    types, constants = _types(config, layout, tma=tma)
    types |= {"x_ptr": "*bf16:16", "data_ptrs": "*i64:16", "flag_ptrs": "*i64:16"}
    if tma:
        types["x_desc"] = f"tensordesc<bf16[{config.block_m},{config.block_k}]>"
    else:
        constants["x_desc"] = None
    return compiled(
        gemm_reduce_scatter_kernel,
        types,
        constants,
        10 * capability[0] + capability[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def gather(
    config: GemmConfig, capability: tuple[int, int], layout: str = "NK", *, straddling: bool = False
) -> Any:
    from megascale.flux.all_gather_gemm.kernel import all_gather_gemm_kernel

    tma = config.tma and capability >= HOPPER
    types, constants = _types(config, layout, tma=tma)
    types |= {"own_ptr": "*bf16:16", "gathered_ptr": "*bf16:16", "flags_ptr": "*i32:16"}
    types |= {"done_ptr": "*i32:16", "chunk_rows": "i32", "chunks": "i32", "clear": "i32"}
    constants["STRADDLING"] = straddling
    if tma:
        rows = f"tensordesc<bf16[{config.block_m},{config.block_k}]>"
        out = f"tensordesc<bf16[{config.block_m},{config.block_n}]>"
        types |= {"own_desc": rows, "gathered_desc": rows, "out_desc": out}
    else:
        constants |= {"own_desc": None, "gathered_desc": None, "out_desc": None}
    return compiled(
        all_gather_gemm_kernel,
        types,
        constants,
        10 * capability[0] + capability[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def portable(op: str, capability: tuple[int, int], m: int = 8192) -> list[GemmConfig]:
    """The candidates of this engine, its default first, as far as their tiles differ."""
    problem = Problem(op, m, 4096, 4096, 2, torch.bfloat16, "NK")  # type: ignore[arg-type]
    found = gather_candidates if op == "ag_gemm" else scatter_candidates
    first = [c for c in found(problem, capability) if c.engine == "portable"]
    return [c for c in first if c.group_m == first[0].group_m and getattr(c, "chunks", 1) == 1]


def test_a_flag_follows_the_stores_and_a_barrier() -> None:
    """Peers must not see a flag before its tile; flags are cleared once all threads saw them."""
    kernel = scatter(portable("gemm_rs", HOPPER)[0], HOPPER)
    ptx = kernel.asm["ptx"]
    assert always_precede(ptx, STORE_TILE, BARRIER, SET_FLAG)
    assert always_precede(ptx, READ_FLAG, BARRIER, CLEAR_FLAG)
    found = usage(kernel)
    assert found.stack_bytes == 0, found
    assert found.shared_bytes <= SHARED_BYTES[HOPPER], found


@pytest.mark.parametrize("straddling", [False, True])
def test_all_gather_gemm_on_hopper(straddling: bool) -> None:
    kernel = gather(portable("ag_gemm", HOPPER)[0], HOPPER, straddling=straddling)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "fence.proxy.async.global" in ptx
    found = usage(kernel)
    assert found.stack_bytes == 0, found
    assert found.shared_bytes <= SHARED_BYTES[HOPPER], found


@pytest.mark.full
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("m", [64, 8192])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_candidates_compile(op: str, m: int, capability: tuple[int, int], layout: str) -> None:
    """All fit into shared memory; the default spills no register."""
    build = gather if op == "ag_gemm" else scatter
    for i, config in enumerate(portable(op, capability, m)):
        kernel = build(config, capability, layout)
        found = usage(kernel)
        print(op, capability, layout, config, found)
        assert found.shared_bytes <= SHARED_BYTES[capability], (config, found)
        assert i > 0 or found.stack_bytes == 0, (config, found)
        if op == "gemm_rs":
            assert always_precede(kernel.asm["ptx"], STORE_TILE, BARRIER, SET_FLAG)


@pytest.mark.full
def test_without_descriptors_on_hopper() -> None:
    """Shapes whose rows are no multiple of 16 bytes take this way."""
    config = GemmConfig(tma=False)
    for kernel in (scatter(config, HOPPER), gather(config, HOPPER, straddling=True)):
        assert "cp.async.bulk" not in kernel.asm["ptx"]
        assert usage(kernel).stack_bytes == 0


_STORE, _BARRIER, _FLAG = "st.global.v4.b32 [%r1];", "bar.sync 0;", "atom.global.sys.release.exch;"


@pytest.mark.parametrize(
    ("right", "body"),
    [
        (True, [_STORE, _BARRIER, _FLAG]),
        (True, ["@%p1 bra $L1;", _STORE, _BARRIER, _FLAG, "$L1:"]),
        (True, ["$L0:", _STORE, _STORE, _BARRIER, _FLAG, "@%p1 bra $L0;"]),
        (False, [_STORE, _FLAG]),
        (False, [_BARRIER, _STORE, _FLAG, _BARRIER]),
        (False, ["@%p1 bra $L1;", _STORE, _BARRIER, "$L1:", _FLAG]),
        (False, ["$L0:", _FLAG, _STORE, _BARRIER, "@%p1 bra $L0;"]),
        (False, [_STORE, _BARRIER, "$L0:", _FLAG, "@%p1 bra $L0;"]),
        (False, ["bra.uni $L1;", _STORE, _BARRIER, _FLAG, "$L1:"]),
    ],
)
def test_the_check_of_order_finds_what_is_wrong(right: bool, body: list[str]) -> None:
    assert always_precede("\n".join([*body, "ret;"]), STORE_TILE, BARRIER, SET_FLAG) is right
