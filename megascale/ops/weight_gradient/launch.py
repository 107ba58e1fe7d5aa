"""When the Hopper kernel adds a weight gradient, with which tiles, and its launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from megascale.kernels.driver import current_stream
from megascale.kernels.hopper_gemm import CONSUMER_WARPS, descriptor
from megascale.kernels.kernel_call import MOST_CALLS, KernelCall, loaded
from megascale.kernels.remembered import Remembered
from megascale.ops.weight_gradient.hopper import weight_gradient_hopper


@dataclass(frozen=True)
class Tiles:
    """How the kernel cuts a problem. Others were slower (docs/log.md): 256 x 128 and 128 x 128.

    block_m, block_n  rows (O) and columns (I) of a tile; block_k rows (T) of a step
    pieces            in which a finished tile leaves; a piece has block_n / pieces columns
    group_m           tile rows that are walked together, for the L2 cache
    fetch             step of a tile at which its old values are fetched; the last tile's pieces
                      have left shared memory by then
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_stages: int = 3
    pieces: int = 8
    group_m: int = 8
    fetch: int = 2


DEFAULT_TILES = Tiles()
MOST_PAIRS = 4
_ENOUGH_ROWS = 8192


def pays(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the kernel is faster than cuBLAS's accumulating GEMM (docs/log.md).

    With one pair of 2048 or 4096 rows both are bound by the fp32 gradient's bytes, and change
    places with the shape; over more rows the kernel has enough to multiply in the meantime.
    """
    return len(pairs) > 1 or pairs[0][1].shape[0] >= _ENOUGH_ROWS


def can_launch(main_grad_OI: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether the kernel takes these: fp32 += 16 bits, whole rows that begin at 16 bytes."""
    x_TI = pairs[0][1]
    operands = [tensor for pair in pairs for tensor in pair]
    return (
        main_grad_OI.dtype == torch.float32
        and x_TI.dtype in (torch.bfloat16, torch.float16)
        and len(pairs) <= MOST_PAIRS
        and x_TI.shape[0] > 0
        and all(t.dtype == x_TI.dtype and t.shape[0] == x_TI.shape[0] for t in operands)
        and all(_has_whole_rows(t) for t in (main_grad_OI, *operands))
    )


def _has_whole_rows(matrix: Tensor) -> bool:
    row_bytes = matrix.shape[1] * matrix.itemsize
    return matrix.is_contiguous() and matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0


_calls: Remembered[tuple[object, ...], KernelCall] = Remembered(MOST_CALLS)


def launch(
    main_grad_OI: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    *,
    overwrite: bool,
    num_sms: int,
    tiles: Tiles = DEFAULT_TILES,
) -> None:
    """Add (or write) the sum of grad_y^T @ x over `pairs` on the current stream.

    The tensors are as `can_launch` says.
    """
    x_TI = pairs[0][1]
    key = (
        x_TI.shape[0], *main_grad_OI.shape, len(pairs), x_TI.dtype, overwrite, num_sms, tiles,
        x_TI.device,
    )  # fmt: skip
    call = _calls.get(key)
    if call is None:
        arguments, constants, programs = arguments_of(
            main_grad_OI, pairs, tiles, overwrite=overwrite, num_sms=num_sms
        )
        options = {"num_warps": CONSUMER_WARPS.value}
        compiled = loaded(weight_gradient_hopper, x_TI.device, arguments, constants | options)
        call = _calls[key] = KernelCall(compiled, arguments, programs)
    call.launch(current_stream(x_TI.device.index), (*_operands(pairs), main_grad_OI))


def _operands(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """grad_y and x of MOST_PAIRS pairs; those that are not there are the first."""
    padded = [*pairs, *[pairs[0]] * (MOST_PAIRS - len(pairs))]
    return [tensor for pair in padded for tensor in pair]


def arguments_of(
    main_grad_OI: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    tiles: Tiles,
    *,
    overwrite: bool,
    num_sms: int,
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Arguments and constants of the kernel, and its number of programs."""
    rows, columns = main_grad_OI.shape
    tiles_m, tiles_n = cdiv(rows, tiles.block_m), cdiv(columns, tiles.block_n)
    blocks = ((tiles.block_k, tiles.block_m), (tiles.block_k, tiles.block_n))
    names = [name for i in range(MOST_PAIRS) for name in (f"grad_{i}", f"x_{i}")]
    arguments = {
        name: descriptor(tensor, block)
        for name, tensor, block in zip(names, _operands(pairs), blocks * MOST_PAIRS, strict=True)
    }
    piece = (tiles.block_m, tiles.block_n // tiles.pieces)
    arguments |= {
        "out_desc": descriptor(main_grad_OI, piece),
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "k_steps": cdiv(pairs[0][1].shape[0], tiles.block_k),
    }
    constants = {
        "PAIRS": len(pairs),
        "STAGES": tiles.num_stages,
        "GROUP_M": tiles.group_m,
        "FETCH": tiles.fetch,
        "OVERWRITE": overwrite,
    }
    return arguments, constants, min(num_sms, tiles_m * tiles_n)
