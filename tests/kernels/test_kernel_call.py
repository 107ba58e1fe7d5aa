"""Parameters laid out for the driver: order, sizes and values that the compiled kernel reads."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.kernels import kernel_call
from megascale.kernels.kernel_call import KernelCall, Parameters

META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64]}
SIGNATURE = {
    "x_desc": "tensordesc<bf16[128, 64],NVMMASharedLayout()>",
    "out_ptr": "*bf16",
    "ones": "constexpr",
    "rows": "i32",
    "bytes": "i64",
}


class FakeDriver:
    """Stands for libcuda: a tensor map is its arguments in words."""

    def __init__(self) -> None:
        self.maps: list[tuple[Any, ...]] = []

    def tensor_map(self, address: int, shape: Any, block: Any, kind: Any) -> bytes:
        self.maps.append((address, shape, block, kind.data_type, kind.swizzle))
        return address.to_bytes(8, "little").ljust(128, b"m")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(kernel_call, "driver", lambda: driver)
    return driver


def _parameters() -> Parameters:
    described = SimpleNamespace(shape=[1000, 512], strides=[512, 1])
    arguments = {
        "x_desc": described,
        "out_ptr": torch.zeros(1),
        "ones": 1,
        "rows": 1000,
        "bytes": 1 << 40,
    }
    parameters = Parameters(SIGNATURE, arguments, [META])
    parameters.finish(4096)
    return parameters


def _word(parameters: Parameters, index: int, kind: Any = ctypes.c_uint64) -> int:
    return int(kind.from_address(parameters.addresses[index]).value)


def test_parameters_are_in_the_order_of_tritons_launcher(fake: FakeDriver) -> None:
    parameters = _parameters()
    parameters.point_at([1 << 20, 1 << 21])
    assert fake.maps == [(1 << 20, (1000, 512), (128, 64), 9, 3)]
    assert [address % 64 for address in parameters.addresses] == [0] * 10
    # map, two sizes, two strides, pointer, int32, int64, two scratch memories
    assert _word(parameters, 0) == 1 << 20
    assert [_word(parameters, i, ctypes.c_int32) for i in (1, 2)] == [1000, 512]
    assert [_word(parameters, i, ctypes.c_int64) for i in (3, 4)] == [512, 1]
    assert _word(parameters, 5) == 1 << 21
    assert _word(parameters, 6, ctypes.c_int32) == 1000
    assert _word(parameters, 7, ctypes.c_int64) == 1 << 40
    assert [_word(parameters, i) for i in (8, 9)] == [4096, 0]
    assert list(parameters.array) == parameters.addresses


def test_only_what_moved_is_rewritten_and_maps_are_remembered(fake: FakeDriver) -> None:
    parameters = _parameters()
    for x, out in [(64, 128), (64, 256), (4096, 256), (64, 128)]:
        parameters.point_at([x, out])
        assert (_word(parameters, 0), _word(parameters, 5)) == (x, out)
    assert [seen[0] for seen in fake.maps] == [64, 4096]


def test_maps_of_many_addresses_are_bounded(fake: FakeDriver) -> None:
    """Some 200 bytes each, of thousands of descriptors."""
    parameters = _parameters()
    place = parameters._places[0]
    most = 0
    for number in range(300):
        parameters.point_at([64 * (number + 1), 128])
        most = max(most, len(place._maps))
    assert most == kernel_call._MOST_MAPS <= 64
    assert len(fake.maps) == 300, "each once, as long as none comes again"


def test_an_address_that_the_compiler_was_not_told_of_is_refused(fake: FakeDriver) -> None:
    with pytest.raises(AssertionError, match="tensor 1 at an address that 16 does not divide"):
        _parameters().point_at([64, 72])


def test_launches_of_two_threads_do_not_mix_their_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int]] = []

    class SlowDriver:
        def launch(self, *arguments: Any) -> None:
            address = arguments[-1][0]
            before = ctypes.c_uint64.from_address(address).value
            time.sleep(0.001)  # the driver copies the parameters; the interpreter lock is free
            seen.append((before, ctypes.c_uint64.from_address(address).value))

    monkeypatch.setattr(kernel_call, "driver", SlowDriver)
    compiled = SimpleNamespace(
        function=1,
        src=SimpleNamespace(signature={"x_ptr": "*i32"}),
        metadata=SimpleNamespace(
            num_warps=4, shared=0, global_scratch_size=0, tensordesc_meta=None
        ),
    )
    tensors = [torch.zeros(64, dtype=torch.int32) for _ in range(2)]
    call = KernelCall(compiled, {"x_ptr": tensors[0]}, 1)

    def repeat(tensor: torch.Tensor) -> None:
        for _ in range(20):
            call.launch(0, [tensor])

    threads = [threading.Thread(target=repeat, args=(tensor,)) for tensor in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(before == after for before, after in seen)
    assert {before for before, _ in seen} == {tensor.data_ptr() for tensor in tensors}


@pytest.mark.full
def test_the_compiled_kernel_has_these_parameters() -> None:
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from megascale.flux.all_gather_gemm.hopper import all_gather_gemm_hopper

    def described(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
        return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"

    signature = {
        "own_desc": described(128, 64),
        "gathered_desc": described(128, 64),
        "weight_desc": described(256, 64),
        "out_desc": described(128, 256),
        "bias_ptr": "*bf16",
        "flags_ptr": "*i32",
        "done_ptr": "*i32",
        "report_ptr": "*i64",
    }
    constants = {
        "STAGES": 3, "GROUP_M": 8, "WORLD": 2, "CHUNKS": 1, "KN": False, "STRADDLE": False,
        "HAS_BIAS": False, "CLEAR": True, "DEADLINE_NS": 0,
    }  # fmt: skip
    names = all_gather_gemm_hopper.arg_names
    types = {n: "constexpr" if n in constants else signature.get(n, "i32") for n in names}
    source = GluonASTSource(
        all_gather_gemm_hopper, types, {(names.index(n),): v for n, v in constants.items()}
    )
    from triton import compile as compile_kernel

    compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    found = re.findall(
        r"\.param \.(?:align (\d+) \.)?(\w+)[^,]*?_param_\d+(\[128\])?", _entry(compiled)
    )
    arguments: dict[str, Any] = {n: 3 for n in names if n not in constants}
    arguments |= {n: torch.zeros(1) for n in signature if n.endswith("_ptr")}
    arguments |= {
        n: SimpleNamespace(shape=[8, 8], strides=[8, 1]) for n in signature if n.endswith("_desc")
    }
    parameters = Parameters(types, arguments, compiled.metadata.tensordesc_meta)
    parameters.finish(0)
    assert len(found) == len(parameters.addresses)
    assert [bool(size) for _, _, size in found[:6]] == [True, *[False] * 4, True]


def _entry(compiled: Any) -> str:
    """The parameter list of the kernel in its PTX."""
    ptx: str = compiled.asm["ptx"]
    return ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
