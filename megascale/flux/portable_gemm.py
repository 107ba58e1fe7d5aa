"""One output tile of a GEMM in plain Triton: what the portable fused kernels share.

Operands come through descriptors (TMA: one instruction a tile; Hopper and later) or through
pointers with masks (every GPU, and rows that are no multiple of 16 bytes, which no descriptor
takes). Both accumulate in fp32 in the same order of K. On Hopper a warp-specialised engine is
faster at small K (`hopper_gemm.py`); this one compiles everywhere and runs in the interpreter.

x [rows, K] is row-major; the weight is [N, K] ("NK") or [K, N] ("KN").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale.flux.gemm_config import HOPPER, GemmConfig, capability_of
from megascale.flux.problem import Layout
from megascale.flux.signals import INTERPRETED
from megascale.kernels.driver import current_stream
from megascale.kernels.kernel_call import MOST_CALLS, KernelCall, loaded
from megascale.kernels.remembered import Remembered

ALIGNMENT_BYTES = 16


@triton.jit
def place_in_grid(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tile row, tile column) number `tile` of a grid: `tiles.grouped`."""
    tiles_in_group = GROUP_M * tiles_n
    first_m = tile // tiles_in_group * GROUP_M
    height = tl.minimum(tiles_m - first_m, GROUP_M)
    inside = tile % tiles_in_group
    return first_m + inside % height, inside // height


@triton.jit
def tile_product(  # type: ignore[no-untyped-def]
    x, row, num_rows, weight, column, n, k,
    TMA: tl.constexpr, NK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_M, BLOCK_N]: rows of x from `row` times columns of the weight from `column`.

    x, weight   descriptors with TMA, else addresses
    num_rows    rows of the tile that exist; none: the product is 0 and nothing is read
    """
    blocks = tl.where(num_rows > 0, tl.cdiv(k, BLOCK_K), 0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if TMA:
        for block in range(blocks):
            a = x.load([row, block * BLOCK_K])
            if NK:
                b = weight.load([column, block * BLOCK_K]).T
            else:
                b = weight.load([block * BLOCK_K, column])
            acc = _dot(a, b, acc)
    else:
        # Rows and columns past the end repeat the last one: what they give is never stored.
        ks = tl.arange(0, BLOCK_K)
        rows = tl.minimum(tl.arange(0, BLOCK_M), num_rows - 1)
        x_ptrs = x + row.to(tl.int64) * k + (rows[:, None] * k + ks[None, :])
        columns = column + tl.arange(0, BLOCK_N)
        if NK:
            columns = tl.minimum(columns, n - 1)
            weight_ptrs = weight + columns[None, :].to(tl.int64) * k + ks[:, None]
        else:
            weight_ptrs = weight + ks[:, None].to(tl.int64) * n + columns[None, :]
        for block in range(blocks):
            left = k - block * BLOCK_K
            a = tl.load(x_ptrs, mask=ks[None, :] < left, other=0.0)
            x_ptrs += BLOCK_K
            if NK:
                b = tl.load(weight_ptrs, mask=ks[:, None] < left, other=0.0)
                weight_ptrs += BLOCK_K
            else:
                inside = (ks[:, None] < left) & (columns[None, :] < n)
                b = tl.load(weight_ptrs, mask=inside, other=0.0)
                weight_ptrs += BLOCK_K * n
            acc = _dot(a, b, acc)
    return acc


@triton.jit
def _dot(a, b, acc):  # type: ignore[no-untyped-def]
    """acc + a b in fp32. The interpreter's product of bf16 is wrong: there operands are widened."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:  # noqa: RET505 - a branch at compile time: Triton refuses two returns without it
        return tl.dot(a, b, acc)


@triton.jit
def order_descriptors():  # type: ignore[no-untyped-def]
    """What this thread has acquired through ordinary loads, its loads by TMA see as well."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
        )


@triton.jit
def add_bias(acc, bias_ptr, columns, n):  # type: ignore[no-untyped-def]
    """acc + bias of these columns."""
    bias = tl.load(bias_ptr + columns, mask=columns < n, other=0.0)
    return acc + bias.to(tl.float32)[None, :]


@cache
def _has_descriptors(device: torch.device) -> bool:
    """The device has TMA. So has the interpreter, which plays it on CPU tensors."""
    return device.type == "cpu" or capability_of(device) >= HOPPER


def can_describe(device: torch.device, *num_columns: int) -> bool:
    """Whether contiguous 16-bit matrices of so many columns have descriptors here, if aligned."""
    return all(n * 2 % ALIGNMENT_BYTES == 0 for n in num_columns) and _has_descriptors(device)


def describe(matrix: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """A descriptor of a contiguous tensor as a matrix of its last dimension."""
    columns = matrix.shape[-1]
    rows = matrix.numel() // columns
    return TensorDescriptor(matrix, [rows, columns], [columns, 1], [block_rows, block_columns])


def describe_weight(weight: Tensor, config: GemmConfig, layout: Layout) -> TensorDescriptor:
    """The descriptor of a weight, [N, K] or [K, N], in blocks as `tile_product` loads them."""
    if layout == "NK":
        return describe(weight, config.block_n, config.block_k)
    return describe(weight, config.block_k, config.block_n)


def aligned(tensors: Sequence[Tensor | None]) -> bool:
    """16 bytes divide every address."""
    bits = 0
    for tensor in tensors:
        if tensor is not None:
            bits |= tensor.data_ptr()
    return bits % ALIGNMENT_BYTES == 0


class Launches:
    """The launches of one kernel: by Triton at first, then by the driver (`kernel_call.py`).

    kernel  its arguments that are not constant come first
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._calls: Remembered[tuple[Any, ...] | None, KernelCall] = Remembered(MOST_CALLS)

    def again(self, key: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> bool:
        """Launch what `first` has launched for this key, with these tensors; False: it has not.

        key      all that a launch has but addresses, which 16 bytes divide
        tensors  those of `first`, in the order of the arguments
        """
        call = self._calls.get(key)
        if call is None:
            return False
        present = [tensor for tensor in tensors if tensor is not None]
        call.launch(current_stream(present[0].device.index), present)
        return True

    def prepared(
        self,
        key: tuple[Any, ...] | None,
        tensors: Sequence[Tensor | None],
        make: Callable[[], tuple[int, dict[str, Any], dict[str, Any]]],
        config: GemmConfig,
    ) -> Callable[[], None]:
        """What launches with these tensors: compiled and loaded here, kept under the key if any.

        make  gives (programs, arguments, constants)
        """
        call = None if key is None else self._calls.get(key)
        present = [tensor for tensor in tensors if tensor is not None]
        device = present[0].device
        if call is None:
            programs, arguments, constants = make()
            constants = {
                **constants, "num_stages": config.num_stages, "num_warps": config.num_warps
            }  # fmt: skip
            compiled = loaded(self._kernel, device, arguments, constants)
            if key is None or compiled is None:
                return partial(self._kernel[(programs,)], **arguments, **constants)
            call = self._calls[key] = KernelCall(compiled, arguments, programs)
        return lambda: call.launch(current_stream(device.index), present)

    def first(
        self,
        key: tuple[Any, ...] | None,
        num_programs: int,
        arguments: dict[str, Any],
        constants: dict[str, Any],
        config: GemmConfig,
    ) -> None:
        """Launch by Triton, which compiles. Without a key it is forgotten."""
        names = self._kernel.arg_names
        assert [*arguments, *constants] == names, (arguments.keys(), constants.keys(), names)
        compiled = self._kernel[(num_programs,)](
            **arguments, **constants, num_stages=config.num_stages, num_warps=config.num_warps
        )
        if key is not None and compiled is not None:  # the interpreter compiles nothing
            self._calls[key] = KernelCall(compiled, arguments, num_programs)
