"""The kernels of the relay compile for GPUs that are not there: what adds, when, and spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.flux.gemm_config import HOPPER
from megascale.flux.gemm_reduce_scatter.in_flight.config import InFlightReduceScatter, candidates
from megascale.flux.problem import Problem
from tests.flux.ahead_of_time import NAMES, compiled, compiled_gluon
from tests.flux.ptx import Usage, always_precede, branching, usage
from tests.flux.test_compile_ahead import AMPERE, SHARED_BYTES

pytest.importorskip("triton")

M = 1024
ODD = 776, 520  # columns, reduction: multiples of 8 and not of 16
EVEN = 512, 768
STORE = r"cp\.async\.bulk\.tensor\.2d\.global\.shared"
ADD_BY_TMA = r"cp\.reduce\.async\.bulk\.tensor\.2d\.global\.shared::cta\.add"
ADD_16_BYTES = r"(atom|red)\.global\.sys\.relaxed\.add\.noftz\.v8\.(bf|f)16 "
WRITTEN = r"cp\.async\.bulk\.wait_group 0"
READ_FLAG = r"ld\.acquire\.sys\.global\.b32"
SET_FLAG = r"atom\.global\.sys\.release\.exch"
PROXY_FENCE = r"fence\.proxy\.async\.global"
BARRIER = r"bar\.(warp\.)?sync|barrier\.sync"


def _arena(deadline_ns: int = 0) -> Any:
    return SimpleNamespace(
        num_sms=132, deadline_ns=deadline_ns, report=torch.zeros(1, dtype=torch.int64)
    )


def _tensors(
    dtype: torch.dtype, layout: str, world: int, sizes: tuple[int, int]
) -> dict[str, torch.Tensor]:
    n, k = sizes
    shapes = {
        "x": (M, k),
        "weight": (n, k) if layout == "NK" else (k, n),
        "bias": (n,),
        "out": (M // world, n),
    }
    return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}


def hopper(
    config: InFlightReduceScatter,
    world: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "NK",
    deadline_ns: int = 0,
) -> Any:
    """The Hopper kernel as a launch of this configuration would compile it."""
    from megascale.flux.gemm_reduce_scatter.in_flight.hopper import in_flight_hopper
    from megascale.flux.gemm_reduce_scatter.in_flight.hopper_launch import _arguments

    given, pointers = _tensors(dtype, layout, world, ODD), torch.zeros(world, dtype=torch.int64)
    arena, slot = _arena(deadline_ns), SimpleNamespace(rank=1, world_size=world)
    data = torch.empty(given["out"].numel() * 2, dtype=torch.uint8)
    tensors = (
        given["x"], given["weight"], data, given["out"], given["bias"], pointers, pointers,
        arena.report,
    )  # fmt: skip
    _, arguments, constants = _arguments(tensors, slot, arena, config, layout, False)  # type: ignore[arg-type]
    return compiled_gluon(in_flight_hopper, arguments, constants)


def portable(
    config: InFlightReduceScatter,
    capability: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    deadline_ns: int = 0,
    sizes: tuple[int, int] = ODD,
) -> Any:
    from megascale.flux.gemm_reduce_scatter.in_flight import kernel

    world, arena = 4, _arena(deadline_ns)
    given, pointers = _tensors(dtype, "NK", world, sizes), torch.zeros(world, dtype=torch.int64)
    operands = (given["x"], given["weight"], None, given["out"])
    tensors = (*operands, pointers, pointers, arena.report)
    slot = SimpleNamespace(rank=1, world_size=world)
    _, arguments, constants = kernel._arguments(
        tensors,
        slot,  # type: ignore[arg-type]
        arena,
        config,
        "NK",
        are_aligned=True,
    )
    constants |= {"bias_ptr": None, "ATOMIC": kernel.has_atomics(dtype, capability)}
    types = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            types[name] = f"*{NAMES[value.dtype]}:16"
        elif isinstance(value, int):
            divides = value % 16 == 0 and name not in ("m", "rows", "rank")
            types[name] = "i32:16" if divides else "i32"
        elif value is not None:
            types[name] = f"tensordesc<{NAMES[value.base.dtype]}{value.block_shape}>"
    return compiled(
        kernel.in_flight_kernel,
        types,
        constants,
        10 * capability[0] + capability[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _with_first_only(ptx: str, pattern: str) -> str:
    """Without what follows the first of instructions that stand in a row."""
    first = re.search(pattern, ptx)
    assert first
    return ptx[: first.end()] + re.sub(pattern, "nothing ", ptx[first.end() :])


def _sass(kernel: Any, folder: Path) -> str:
    """Machine code."""
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    ran = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True)
    return ran.stdout


def _in_bounds(kernel: Any, capability: tuple[int, int]) -> Usage:
    found = usage(kernel)
    assert found.stack_bytes == 0, found
    assert found.shared_bytes <= SHARED_BYTES[capability], found
    return found


ENGINE = InFlightReduceScatter("hopper", group_m=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tma_adds_in_the_type_of_x(dtype: torch.dtype, tmp_path: Path) -> None:
    kernel = hopper(ENGINE, dtype=dtype)
    ptx = kernel.asm["ptx"]
    # of the descriptor of a peer's slot, which programs make: the type in which TMA adds
    element = {torch.bfloat16: "0xa", torch.float16: "0x6"}[dtype]
    assert set(re.findall(r"tile\.elemtype.* (0x\w+);", ptx)) == {element}
    assert len(re.findall(ADD_BY_TMA, ptx)) >= ENGINE.pieces
    sass = _sass(kernel, tmp_path)
    assert "UTMAREDG.2D.ADD" in sass
    assert not re.search(r"ATOMG\.E\.(ADD|CAS)", sass)
    _in_bounds(kernel, HOPPER)


def test_a_turn_is_over_when_the_tile_is_there() -> None:
    ptx = branching(hopper(ENGINE).asm["ptx"])
    assert always_precede(ptx, f"{STORE}|{ADD_BY_TMA}", WRITTEN, SET_FLAG)
    # nothing is added before a turn was awaited and fenced
    assert always_precede(_with_first_only(ptx, ADD_BY_TMA), READ_FLAG, PROXY_FENCE, ADD_BY_TMA)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("world", [2, 8])
def test_candidates_of_the_engine_compile(world: int, layout: str) -> None:
    problem = Problem("gemm_rs", 8192, 4096, 4096, world, torch.bfloat16, "NK")
    found = [c for c in candidates(problem, HOPPER) if c.engine == "hopper"]
    assert found
    for config in found:
        kernel = hopper(config, world, layout=layout)
        print(config, _in_bounds(kernel, HOPPER))


@pytest.mark.full
def test_debug_mode_reports_and_traps() -> None:
    second = 10**9
    of_engine = branching(hopper(ENGINE, deadline_ns=second).asm["ptx"])
    for ptx in (of_engine, portable(SMALL, HOPPER, deadline_ns=second).asm["ptx"]):
        assert always_precede(ptx, READ_FLAG, r"fence\.sc\.sys", r"trap;")


SMALL = InFlightReduceScatter(block_n=128, block_k=32)


@pytest.mark.parametrize(
    ("capability", "dtype", "adds"),
    [
        (HOPPER, torch.bfloat16, "REDG.E.ADD.BF16x8.RN.STRONG.SYS"),
        (HOPPER, torch.float16, "REDG.E.ADD.F16x8.RN.STRONG.SYS"),
        (AMPERE, torch.float16, "RED.E.ADD.F16x2.RN.STRONG.SYS"),
        (AMPERE, torch.bfloat16, None),  # it has none: read, added to and stored
    ],
)
def test_the_portable_kernel_adds_without_a_loop(
    capability: tuple[int, int], dtype: torch.dtype, adds: str | None, tmp_path: Path
) -> None:
    config = (
        SMALL if capability == HOPPER else InFlightReduceScatter(block_n=128, block_k=32, tma=False)
    )
    kernel = portable(config, capability, dtype)
    sass = _sass(kernel, tmp_path)
    assert set(re.findall(r"REDG?\.E\.ADD\S*", sass)) == ({adds} if adds else set())
    assert "ATOMG.E.CAS" not in sass
    _in_bounds(kernel, capability)


def test_a_flag_of_the_portable_kernel_follows_the_tile_and_a_barrier() -> None:
    ptx = portable(SMALL, HOPPER).asm["ptx"]
    store = r"st\.global\.v4"
    assert always_precede(ptx, f"{store}|{ADD_16_BYTES}", BARRIER, SET_FLAG)
    assert always_precede(ptx, READ_FLAG, BARRIER, r"st\.global\.b32")
    assert always_precede(_with_first_only(ptx, ADD_16_BYTES), READ_FLAG, BARRIER, ADD_16_BYTES)


@pytest.mark.full
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
@pytest.mark.parametrize("m", [64, 8192])
def test_candidates_of_the_portable_kernel_compile(m: int, capability: tuple[int, int]) -> None:
    problem = Problem("gemm_rs", m, 4096, 4096, 4, torch.bfloat16, "NK")
    found = [c for c in candidates(problem, capability) if c.engine == "portable"]
    for i, config in enumerate(found):
        kernel = portable(config, capability, sizes=EVEN)
        measured = usage(kernel)
        print(capability, config, measured)
        assert measured.shared_bytes <= SHARED_BYTES[capability], (config, measured)
        assert i > 0 or measured.stack_bytes == 0, (config, measured)
