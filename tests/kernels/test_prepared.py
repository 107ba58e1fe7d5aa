"""What can fail is done before anything is sent: kernels are compiled and loaded first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megascale.flux.all_gather_gemm.config import FusedAllGather
from megascale.kernels import kernel_call
from tests.distributed import run_ranks
from tests.flux.shared_arena import POISON, SharedArena, interpret_kernels

K, N = 32, 48


class OnCuda(Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


class FakeKernel:
    """Stands for Triton's: notes what is done with it, in order."""

    arg_names = ("x_ptr", "rows")

    def __init__(self, done: list[str]) -> None:
        self.done = done
        self.compiled = SimpleNamespace(
            function=7,
            src=SimpleNamespace(signature={"x_ptr": "*i32", "rows": "i32"}),
            metadata=SimpleNamespace(
                num_warps=4, shared=0, global_scratch_size=0, tensordesc_meta=None
            ),
        )

    def warmup(self, *, grid: Any, **_arguments: Any) -> Any:
        self.done.append("compiled")
        return _Loading(self)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda **_arguments: self.done.append("launched by Triton")


class _Loading:
    """Triton's compiled kernel is loaded when its launcher is asked for."""

    def __init__(self, kernel: FakeKernel) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Any:
        if name == "run":
            self._kernel.done.append("loaded")
            return len
        return getattr(self._kernel.compiled, name)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    driver = SimpleNamespace(launch=lambda *_args: found.append("launched"))
    monkeypatch.setattr(kernel_call, "driver", lambda: driver)
    monkeypatch.setattr(kernel_call, "current_stream", lambda _index: 0)
    return found


def _words(offset: int = 0) -> Tensor:
    base = torch.zeros(64, dtype=torch.int32)
    first = -base.data_ptr() % 64 // 4 + offset
    return base[first : first + 16].as_subclass(OnCuda)


def test_a_launch_is_compiled_and_loaded_when_it_is_prepared(done: list[str]) -> None:
    kernel = FakeKernel(done)
    launch = kernel_call.prepared(kernel, 1, {"x_ptr": _words(), "rows": 3}, {})
    assert done == ["compiled", "loaded"]
    launch()
    launch()
    kernel_call.prepared(kernel, 1, {"x_ptr": _words(), "rows": 3}, {})()
    assert done == ["compiled", "loaded", "launched", "launched", "launched"]


def test_a_launch_is_of_its_integers_its_grid_and_its_constants(done: list[str]) -> None:
    kernel, words = FakeKernel(done), _words()
    for programs, rows, deadline_ns in [(1, 3, 0), (1, 3, 5), (1, 4, 5), (2, 4, 5)]:
        arguments = {"x_ptr": words, "rows": rows}
        for _again in range(2):
            kernel_call.prepared(kernel, programs, arguments, {"DEADLINE_NS": deadline_ns})
    assert done == ["compiled", "loaded"] * 4


def test_so_is_one_for_addresses_that_16_bytes_do_not_divide(done: list[str]) -> None:
    kernel = FakeKernel(done)
    launch = kernel_call.prepared(kernel, 1, {"x_ptr": _words(1), "rows": 3}, {})
    assert done == ["compiled", "loaded"]
    launch()
    assert done == ["compiled", "loaded", "launched by Triton"]


def test_a_kernel_with_its_constants_is_loaded_once(done: list[str]) -> None:
    from megascale.flux.symmetric import prepared
    from megascale.flux.symmetric.prepared import Prepared

    assert vars(prepared)["loaded"] is kernel_call.loaded
    one = Prepared(FakeKernel(done), 1, {"rows": 3}, {})
    one.load(_words())
    one.load(_words())
    assert done == ["compiled", "loaded"]


class NoGpu:
    """Triton's driver of a Hopper GPU that is not there: what a compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def _compiled_by_prepared(rank: int, world_size: int) -> list[int]:
    """Shared memory of kernels in Gluon and Triton, as `loaded` compiles them before a launch."""
    from triton.runtime.driver import driver

    from megascale.flux.symmetric import launch

    hopper = import_module("megascale.flux.all_gather_gemm.hopper")
    driver.set_active(NoGpu())
    found = []

    def loaded(kernel: Any, _device: Any, arguments: Any, constants: Any) -> Any:
        compiled = kernel.warmup(**arguments, grid=(1,), **constants)
        found.append(compiled.metadata.shared)
        return compiled

    class Call:
        def __init__(self, *_args: Any) -> None:
            """A `KernelCall` of a kernel that is on no device."""

    for module in (kernel_call, hopper):
        module.loaded, module.KernelCall = loaded, Call  # type: ignore[attr-defined]
    tiles = FusedAllGather(engine="hopper", block_m=128, block_n=128, block_k=64, num_stages=2)
    flags = torch.zeros(64, dtype=torch.int32)
    report = torch.zeros(8, dtype=torch.int64)
    arena: Any = SimpleNamespace(
        rank=0, world_size=2, num_sms=132, deadline_ns=0, done=flags, report=report
    )
    slot: Any = SimpleNamespace(world_size=2, rank=0, flags=[flags, flags], flag_ptrs=report)
    x_WcK, weight, y_TN = (torch.zeros(s).bfloat16() for s in ((2, 256, 64), (128, 64), (512, 128)))
    hopper.prepared(x_WcK[0], x_WcK, weight, None, y_TN, slot, arena, tiles, "NK", 512)
    launch.waiting(arena, slot, range(2))
    return found


@pytest.mark.full
def test_what_loads_a_kernel_compiles_it_with_the_arguments_of_its_launch() -> None:
    pytest.importorskip("triton")
    ((hopper, waiting),) = run_ranks(_compiled_by_prepared, 1)
    assert hopper > 2 * 2 * (128 + 128) * 64, "stages of both operands"
    assert waiting < 1024


# Which of the kernels that a call loads fails: the first, or of two weights the first of the second
# (in the interpreter few rows have three phases, a kernel each).
FAILING = {"fused": 2, "few_rows": 4}


def _failing_at(number: int) -> Callable[..., Any]:
    """Loads nothing, as in the interpreter, and fails at kernel `number`."""
    count = iter(range(1, 1000))

    def load(*_args: Any) -> None:
        if next(count) == number:
            raise RuntimeError("out of shared memory")

    return load


def _forms(arena: SharedArena) -> dict[str, Callable[[int], Any]]:
    """Every form that sends by copy engines, or by a kernel and launches another; calls by m."""
    from megascale.flux.all_gather_gemm import chunked as chunked_gather
    from megascale.flux.all_gather_gemm import few_rows, launch
    from megascale.flux.few_rows.config import FewRows
    from megascale.flux.gemm_reduce_scatter import chunked as chunked_scatter
    from megascale.flux.gemm_reduce_scatter.chunked import ChunkedReduceScatter
    from megascale.flux.symmetric.all_gather import all_gather, start_all_gather
    from megascale.flux.symmetric.reduce_scatter import reduce_scatter

    weights = [torch.ones(N, K), torch.ones(N, K)]

    def gather(form: Any, count: int, m: int, **options: Any) -> Any:
        x_tK = torch.ones(m // arena.world_size, K)
        biases = [None] * count
        outputs, _ = form(
            x_tK, weights[:count], biases, arena, layout="NK", num_rows=m, gathered=True, **options
        )
        return outputs[-1]

    def scatter(m: int, **options: bool) -> Any:
        config = ChunkedReduceScatter(**options)
        x_TK = torch.ones(m, K)
        return chunked_scatter.gemm_reduce_scatter(
            x_TK, weights[0], None, arena, layout="NK", config=config
        )

    def rows(m: int) -> Tensor:
        return torch.ones(m // arena.world_size, K)

    tiles = FusedAllGather(engine="portable", block_m=16, block_n=16, block_k=16)
    few = FewRows(64, 32, 2, 4, 1, 64)
    return {
        "fused": partial(gather, launch.all_gather_gemm, 2, config=tiles),
        "few_rows": partial(gather, few_rows.all_gather_gemm, 2, config=few),
        "chunked gather": partial(gather, chunked_gather.all_gather_gemm, 1),
        "chunked scatter": scatter,
        "chunked scatter, stored": partial(scatter, store=True),
        "chunked scatter, folded": partial(scatter, fold=True),
        "gather by copies": lambda m: all_gather(rows(m), arena, m, transport="copy_engine"),
        "started gather": lambda m: start_all_gather(rows(m), arena, m),
        "scatter by copies": lambda m: reduce_scatter(torch.ones(m, K), arena, copy_engine=True),
    }


def _failing(rank: int, world_size: int) -> list[str]:
    interpret_kernels()
    assert dist.group.WORLD is not None
    arena = SharedArena(dist.group.WORLD, 1 << 14)
    from megascale.flux import portable_gemm
    from megascale.flux.symmetric import prepared

    users: list[Any] = [kernel_call, portable_gemm, prepared]
    right, left = kernel_call.loaded, []
    for name, call in _forms(arena).items():
        load = _failing_at(FAILING.get(name, 1))
        for user in users:
            user.loaded = load
        with pytest.raises(RuntimeError, match="out of shared memory"):
            call(8 * world_size)
        dist.barrier()
        for slot in arena._slots:
            if not bool((slot.data[rank] == POISON).all()) or bool(slot.flags[rank].any()):
                left.append(f"{name} has sent something")
                slot.data[rank].fill_(POISON)
                slot.flags[rank].zero_()
        dist.barrier()
        for user in users:
            user.loaded = right
    return left


@pytest.mark.full
@pytest.mark.timeout(60)
def test_a_kernel_that_does_not_compile_has_sent_nothing() -> None:
    pytest.importorskip("triton")
    assert run_ranks(_failing, 2) == [[], []]
