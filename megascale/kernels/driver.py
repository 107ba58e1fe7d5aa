"""The few CUDA driver calls on the path of every fused call, through ctypes.

Why not torch and Triton's launcher: measured on an H200 host, a fused call spent 190 to 300 us of
host time, most of it in Python between the call and the driver (docs/log.md), where one call of the
driver costs a few. What runs once a process, or once a shape, stays with torch and Triton.

Addresses, streams, events and functions are the driver's handles, as ints.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64
_WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WAIT_WORD, _WRITE_WORD = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_MOST_OPERATIONS = 256  # of one batch
_L2_PROMOTION_128B = 2

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamBatchMemOp_v2": (c_void_p, c_uint, c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuTensorMapEncodeTiled": (
        c_void_p, c_int, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        c_int, c_int, c_int, c_int,
    ),
    "cuGetErrorString": (c_int, ctypes.POINTER(c_char_p)),
}  # fmt: skip


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write of one word."""

    _fields_ = (
        ("operation", c_uint),
        ("address", c_uint64),
        ("value", c_uint64),
        ("flags", c_uint),
        ("alias", c_uint64),
        ("_pad", c_uint64),
    )


class Driver:
    """libcuda. Every method raises RuntimeError with the driver's words where a call fails."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = types
            function.restype = c_int
            setattr(self, f"_{name.removesuffix('_v2')}", function)
        self._calls: Any = self  # methods below use what setattr made

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Device to device; to a peer's memory it runs on a copy engine."""
        self._check(self._calls._cuMemcpyDtoDAsync(to, source, num_bytes, stream))

    def write(self, address: int, value: int, stream: int) -> None:
        """The 4-byte word, after everything before it on the stream, which is visible by then."""
        self._check(self._calls._cuStreamWriteValue32(stream, address, value, 0))

    def wait(self, address: int, value: int, stream: int) -> None:
        """The stream stands until the word has this value; no SM is used."""
        self._check(self._calls._cuStreamWaitValue32(stream, address, value, _WAIT_EQUAL))

    def taking(self, words: Sequence[tuple[int, int]]) -> Any:
        """For `take`: (address, value) of at most 128 words."""
        operations = [
            *(_Operation(_WAIT_WORD, address, value, _WAIT_EQUAL) for address, value in words),
            *(_Operation(_WRITE_WORD, address) for address, _ in words),
        ]
        assert 0 < len(operations) <= _MOST_OPERATIONS, len(operations)
        return (_Operation * len(operations))(*operations)

    def take(self, words: Any, stream: int) -> None:
        """The stream stands until all words have their values, and puts them back to 0: in one call
        what two for each word do."""
        self._check(self._calls._cuStreamBatchMemOp(stream, len(words), words, 0))

    def record(self, event: int, stream: int) -> None:
        """The event is what the stream has queued so far."""
        self._check(self._calls._cuEventRecord(event, stream))

    def follow(self, stream: int, event: int) -> None:
        """What the stream does from here on comes after the event."""
        self._check(self._calls._cuStreamWaitEvent(stream, event, 0))

    def launch(
        self, function: int, programs: int, threads: int, shared: int, stream: int, params: Any
    ) -> None:
        """A one-dimensional grid; `params` is an array of addresses of the parameters."""
        self._check(
            self._calls._cuLaunchKernel(
                function, programs, 1, 1, threads, 1, 1, shared, stream, params, None
            )
        )

    def tensor_map(
        self, address: int, shape: tuple[int, int], block: tuple[int, int], kind: TensorMapKind
    ) -> bytes:
        """What TMA needs to know of a contiguous matrix [rows, columns] read in such blocks."""
        space = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
        aligned = -(-ctypes.addressof(space) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        rows, columns = shape
        result = self._calls._cuTensorMapEncodeTiled(
            aligned,
            kind.data_type,
            2,
            address,
            (c_uint64 * 2)(columns, rows),
            (c_uint64 * 1)(columns * kind.element_bytes),
            (c_uint32 * 2)(block[1], block[0]),
            (c_uint32 * 2)(1, 1),
            0,
            kind.swizzle,
            _L2_PROMOTION_128B,
            0,
        )
        self._check(result)
        return ctypes.string_at(aligned, TENSOR_MAP_BYTES)

    def _check(self, result: int) -> None:
        if result:
            text = c_char_p()
            self._calls._cuGetErrorString(result, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver: {(text.value or b'error').decode()} ({result})")


class TensorMapKind:
    """Of a tensor map: the driver's numbers of the element type and the swizzle."""

    def __init__(self, data_type: int, element_bytes: int, swizzle: int) -> None:
        self.data_type, self.element_bytes, self.swizzle = data_type, element_bytes, swizzle


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream: 0.2 us, where torch.cuda.current_stream takes 6."""
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


@cache
def driver() -> Driver:
    """The process's driver."""
    return Driver()
