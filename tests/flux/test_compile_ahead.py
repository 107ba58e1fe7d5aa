"""The portable kernels compile for GPUs that are not there: order of their instructions, spills."""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.flux.all_gather_gemm.config import FusedAllGather
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


def _types(arguments: dict[str, Any], unspecialised: list[str]) -> dict[str, str]:
    """Triton's types of a launch's arguments."""
    pointers = {torch.bfloat16: "*bf16:16", torch.int32: "*i32:16", torch.int64: "*i64:16"}
    types = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            types[name] = pointers[value.dtype]
        elif isinstance(value, int):
            divides = value % 16 == 0 and name not in unspecialised
            types[name] = "i32:16" if divides else "i32"
        elif value is not None:
            types[name] = f"tensordesc<bf16{value.block_shape}>"
    return types


def _compiled(kernel: Any, launch: tuple[Any, ...], config: GemmConfig, capability: Any) -> Any:
    _, arguments, constants = launch
    return compiled(
        kernel,
        _types(arguments, kernel.do_not_specialize),
        constants | {name: None for name, value in arguments.items() if value is None},
        10 * capability[0] + capability[1],
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


M, N, K, WORLD = 1024, 512, 768, 2


def _operand(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _arena(deadline_ns: int = 0) -> Any:
    return SimpleNamespace(
        rank=1,
        num_sms=132,
        deadline_ns=deadline_ns,
        done=torch.zeros(1, dtype=torch.int32),
        report=torch.zeros(1, dtype=torch.int64),
    )


def scatter_launch(config: GemmConfig, layout: str = "NK", deadline_ns: int = 0) -> tuple[Any, ...]:
    """(programs, arguments, constants) of a call."""
    from megascale.flux.gemm_reduce_scatter.kernel import _arguments

    arena, pointers = _arena(deadline_ns), torch.zeros(WORLD, dtype=torch.int64)
    weight = _operand(N, K) if layout == "NK" else _operand(K, N)
    tensors = (
        *(_operand(M, K), weight, _operand(N), _operand(M // WORLD, N)),
        *(pointers, pointers, arena.report),
    )
    slot: Any = SimpleNamespace(rank=1, world_size=WORLD)
    return _arguments(tensors, slot, arena, config, layout, are_aligned=True)  # type: ignore[arg-type]


def scatter(config: GemmConfig, capability: tuple[int, int], layout: str = "NK") -> Any:
    from megascale.flux.gemm_reduce_scatter.kernel import gemm_reduce_scatter_kernel

    launch = scatter_launch(config, layout)
    return _compiled(gemm_reduce_scatter_kernel, launch, config, capability)


def gather_launch(
    config: Any, layout: str = "NK", num_rows: int = M, deadline_ns: int = 0
) -> tuple[Any, ...]:
    """(programs, arguments, constants) of a call."""
    from megascale.flux.all_gather_gemm.kernel import _arguments

    arena, rows = _arena(deadline_ns), -(-num_rows // WORLD)
    weight = _operand(N, K) if layout == "NK" else _operand(K, N)
    tensors = (
        *(_operand(num_rows - rows, K), _operand(WORLD, rows, K), weight, None),
        *(_operand(num_rows, N), arena.done, arena.done, arena.report),
    )
    return _arguments(
        tensors,
        arena,
        config,
        layout,  # type: ignore[arg-type]
        num_rows,
        clear=True,
        are_aligned=True,
    )


def gather(
    config: GemmConfig, capability: tuple[int, int], layout: str = "NK", *, straddling: bool = False
) -> Any:
    from megascale.flux.all_gather_gemm.kernel import all_gather_gemm_kernel

    launch = gather_launch(config, layout, M + 2 if straddling else M)
    assert launch[2]["STRADDLING"] == straddling
    return _compiled(all_gather_gemm_kernel, launch, config, capability)


def portable(op: str, capability: tuple[int, int], m: int = 8192) -> list[GemmConfig]:
    """The candidates of this engine, its default first, as far as their tiles differ."""
    problem = Problem(op, m, 4096, 4096, 2, torch.bfloat16, "NK")  # type: ignore[arg-type]
    found = gather_candidates if op == "ag_gemm" else scatter_candidates
    first = [c for c in found(problem, capability) if c.engine == "portable"]
    return [c for c in first if c.group_m == first[0].group_m and getattr(c, "chunks", 1) <= 1]


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
    config = FusedAllGather(tma=False)
    for kernel in (scatter(config, HOPPER), gather(config, HOPPER, straddling=True)):
        assert "cp.async.bulk" not in kernel.asm["ptx"]
        assert usage(kernel).stack_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_debug_mode_reports_and_traps(capability: tuple[int, int]) -> None:
    from megascale.flux.all_gather_gemm.kernel import all_gather_gemm_kernel
    from megascale.flux.gemm_reduce_scatter.kernel import gemm_reduce_scatter_kernel

    config = FusedAllGather(block_n=128, block_k=32, tma=capability >= HOPPER)
    for kernel, launch in (
        (all_gather_gemm_kernel, gather_launch(config, deadline_ns=10**9)),
        (gemm_reduce_scatter_kernel, scatter_launch(config, deadline_ns=10**9)),
    ):
        ptx = _compiled(kernel, launch, config, capability).asm["ptx"]
        assert "%globaltimer" in ptx
        assert always_precede(ptx, READ_FLAG, r"fence\.sc\.sys", r"trap;")


@pytest.mark.full
@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
def test_parameters_are_those_of_the_compiled_kernel(
    op: str, tma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver's launch lays out: as many and as large as the kernel reads, in its order."""
    from megascale.kernels import kernel_call

    fake = SimpleNamespace(tensor_map=lambda address, *_: address.to_bytes(128, "little"))
    monkeypatch.setattr(kernel_call, "driver", lambda: fake)
    config = FusedAllGather(tma=tma, block_n=128)
    if op == "ag_gemm":
        launch, kernel = gather_launch(config), gather(config, HOPPER)
    else:
        launch, kernel = scatter_launch(config), scatter(config, HOPPER)
    arguments, signature = launch[1], kernel.src.signature
    parameters = kernel_call.Parameters(signature, arguments, kernel.metadata.tensordesc_meta)
    parameters.finish(0)
    kinds = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)", kernel.asm["ptx"])
    assert len(parameters.addresses) == len(kinds)
    tensors = [getattr(v, "base", v) for v in arguments.values() if not isinstance(v, int | None)]
    parameters.point_at([tensor.data_ptr() for tensor in tensors])
    found = list(zip(kinds, parameters.addresses, strict=True))
    for name, value in arguments.items():
        if signature[name] == "constexpr":
            continue
        kind, address = found.pop(0)
        word, number = ctypes.c_uint64.from_address(address), ctypes.c_int32.from_address(address)
        if hasattr(value, "base"):  # the tensor map in bytes; its shape and strides follow
            assert (kind, word.value) == ("b8", value.base.data_ptr()), name
            del found[:4]
        elif isinstance(value, torch.Tensor):
            assert (kind, word.value) == ("u64", value.data_ptr()), name
        else:
            assert (kind, number.value) == ("u32", value), name
    assert [kind for kind, _ in found] == ["u64", "u64"]  # Triton's scratch memories


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
