"""A compiled Triton kernel with room for its parameters, launched by the driver itself.

Triton's launcher binds, specialises and encodes all arguments anew in every call, most of the
190 us of host time that a fused reduce-scatter took. For one problem only addresses change from
call to call, so the parameters are laid out once, as Triton's launcher would, and a call rewrites
the addresses that differ from the call before.

Invariant: the kernel was compiled for exactly the integers it is launched with; a `KernelCall`
belongs to one problem, and to one group where the kernel has scratch memory (two launches at once
would share it). Addresses must keep the alignment that the compiler was told (16 bytes):
`launch` refuses others.

What a launch may fail at comes before it: `prepared` compiles and loads the kernel, and what it
gives only launches. So a form prepares before it sends anything, or a kernel that does not compile
would leave data and flags in the slots of peers. (Loading may also wait for kernels that run.)

Who keeps `KernelCall`s keeps at most MOST_CALLS a kernel (`remembered.py`), some 10 KB each, and
15 KB more for a descriptor whose tensor was seen at _MOST_MAPS addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from megascale.kernels.driver import TENSOR_MAP_BYTES, TensorMapKind, current_stream, driver
from megascale.kernels.remembered import Remembered
from megascale.kernels.scratch import scratch_of

_HOST_TYPES = {8: 10, 9: 8, 10: 9}  # Triton's numbers of element types, where the driver's differ
_INTEGERS: dict[str, Any] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
_ALIGNMENT = 64  # of a tensor map; every parameter gets as much
_MOST_MAPS = 64  # of a descriptor of a call: a program with more addresses encodes them again
MOST_CALLS = 1024  # of a kernel: a program with more problems launches them by Triton again

_calls: Remembered[tuple[Any, ...], KernelCall] = Remembered(4 * MOST_CALLS)  # of all its kernels


def launch(
    kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]
) -> None:
    """`kernel[(programs,)](**arguments, **constants)` on the current stream of its tensors' device,
    in a tenth of the host time after the first call with these integers. Arguments: `prepared`.
    """
    prepared(kernel, programs, arguments, constants)()


def prepared(
    kernel: Any, programs: int, arguments: dict[str, Any], constants: dict[str, Any]
) -> Callable[[], None]:
    """What launches this on the stream that is current when it is called.

    arguments  tensors, ints and Nones in the order of the kernel's parameters, at least one tensor
    constants  constexprs and options
    """
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    device = tensors[0].device
    key = (
        kernel,
        programs,
        device,
        *[value.dtype if isinstance(value, Tensor) else value for value in arguments.values()],
        *constants.values(),
    )
    is_aligned = not any(tensor.data_ptr() % 16 for tensor in tensors)
    call = _calls.get(key) if is_aligned else None
    if call is None:
        compiled = loaded(kernel, device, arguments, constants)
        if compiled is None or not is_aligned:
            return partial(kernel[(programs,)], **arguments, **constants)
        call = _calls[key] = KernelCall(compiled, arguments, programs)
    return lambda: call.launch(current_stream(device.index), tensors)


def loaded(
    kernel: Any, device: torch.device, arguments: dict[str, Any], constants: dict[str, Any]
) -> Any:
    """The kernel as compiled for these, on the device and ready; None where it is interpreted."""
    if device.type != "cuda":
        return None
    compiled = kernel.warmup(**arguments, grid=(1,), **constants)
    assert compiled.run is not None  # what asks for it loads the kernel
    return compiled


class KernelCall:
    """One kernel, one problem.

    compiled   what `loaded`, or a launch by Triton, gave
    arguments  what it was compiled for, without the constexprs, by name: descriptors, tensors, ints
    owner      an arena, whose scratch memory the kernel uses if it has any. Without one the memory
               goes with the call, which must then outlive the graphs that hold it
    Tensors of `launch` are those of the descriptors and pointers in the same order.
    """

    def __init__(
        self, compiled: Any, arguments: dict[str, Any], programs: int, owner: Any = None
    ) -> None:
        self._lock = Lock()  # parameters belong to one launch until the driver has copied them
        self._function = compiled.function
        self._programs = programs
        self._threads = 32 * compiled.metadata.num_warps
        self._shared = compiled.metadata.shared
        size = compiled.metadata.global_scratch_size * programs
        self._scratch = scratch_of(self if owner is None else owner, size) if size else None
        metas = compiled.metadata.tensordesc_meta
        self._params = Parameters(compiled.src.signature, arguments, metas)
        self._params.finish(0 if self._scratch is None else self._scratch.data_ptr())

    def launch(self, stream: int, tensors: Sequence[Tensor]) -> None:
        """Launch with these tensors in place of those of the first launch, of the same shapes."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        with self._lock:
            self._params.point_at(addresses)
            driver().launch(
                self._function,
                self._programs,
                self._threads,
                self._shared,
                stream,
                self._params.array,
            )


class Parameters:
    """The parameters of a kernel in memory, in the order and types of Triton's launcher."""

    def __init__(
        self, signature: dict[str, str], arguments: dict[str, Any], metas: Sequence[dict[str, Any]]
    ) -> None:
        self.addresses: list[int] = []  # of every parameter
        self._memory: list[Any] = []
        self._places: list[_Place] = []  # of what `point_at` changes
        self._last: list[int] = []
        descriptions = iter(metas or ())
        for name, value in arguments.items():
            kind = signature[name]
            if kind.startswith("tensordesc"):
                self._describe(value, next(descriptions))
            elif isinstance(value, Tensor):
                place = _Place(self._reserve(8), None, (0, 0), (0, 0))
                self._places.append(place)
                self._last.append(0)
            elif kind != "constexpr":  # an integer that the compiler took for a constant
                address = self._reserve(8)
                _INTEGERS[kind].from_address(address).value = value

    def finish(self, scratch: int) -> None:
        """The two parameters that Triton adds: addresses of its scratch memories."""
        for value in (scratch, 0):
            ctypes.c_uint64.from_address(self._reserve(8)).value = value
        self.array = (ctypes.c_void_p * len(self.addresses))(*self.addresses)

    def point_at(self, addresses: Sequence[int]) -> None:
        """Rewrite what differs from the last time."""
        assert len(addresses) == len(self._last), (len(addresses), len(self._last))
        for index, address in enumerate(addresses):
            if address != self._last[index]:
                assert address % 16 == 0, f"tensor {index} at an address that 16 does not divide"
                self._places[index].point_at(address)
                self._last[index] = address

    def _describe(self, descriptor: Any, meta: dict[str, Any]) -> None:
        kind = TensorMapKind(
            _HOST_TYPES.get(meta["elem_type"], meta["elem_type"]),
            meta["elem_size"],
            meta["swizzle"],
        )
        rows, columns = descriptor.shape
        block = meta["block_size"]
        place = _Place(self._reserve(TENSOR_MAP_BYTES), kind, (rows, columns), (block[0], block[1]))
        self._places.append(place)
        self._last.append(0)
        for size in descriptor.shape:
            ctypes.c_int32.from_address(self._reserve(8)).value = size
        for stride in descriptor.strides:
            ctypes.c_int64.from_address(self._reserve(8)).value = stride

    def _reserve(self, num_bytes: int) -> int:
        memory = ctypes.create_string_buffer(num_bytes + _ALIGNMENT)
        self._memory.append(memory)
        address = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
        self.addresses.append(address)
        return address


class _Place:
    """A parameter that holds an address, or a tensor map of what lies there."""

    def __init__(
        self,
        parameter: int,
        kind: TensorMapKind | None,
        shape: tuple[int, int],
        block: tuple[int, int],
    ) -> None:
        self._parameter, self._kind, self._shape, self._block = parameter, kind, shape, block
        self._maps: Remembered[int, bytes] = Remembered(_MOST_MAPS)

    def point_at(self, address: int) -> None:
        if self._kind is None:
            ctypes.c_uint64.from_address(self._parameter).value = address
            return
        encoded = self._maps.get(address)
        if encoded is None:
            encoded = driver().tensor_map(address, self._shape, self._block, self._kind)
            self._maps[address] = encoded
        ctypes.memmove(self._parameter, encoded, TENSOR_MAP_BYTES)
