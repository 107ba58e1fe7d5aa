"""What can be tuned about the GEMM inside a fused operator, as plain numbers.

No triton here: the tuner lists, stores and compares these in any process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from megascale.errors import FluxError

Engine = Literal["hopper", "portable"]

HOPPER = (9, 0)  # compute capability of H100 and H200


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes and schedule of one kernel. Every rank of a group uses the same in one call.

    engine       "hopper": warp-specialised, sm_90 only; "portable": plain Triton, any CUDA device
    block_m, block_n, block_k   the output tile and the step along the reduction; powers of two
    group_m      tile rows that are walked column by column together, for the L2 cache
    num_stages   steps of operands that are in shared memory at a time
    num_warps    of a program (the Hopper engine has its own number)
    tma          portable: operands through descriptors where device and shapes allow
    """

    engine: Engine = "portable"
    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    group_m: int = 8
    num_stages: int = 3
    num_warps: int = 8
    tma: bool = True

    def __post_init__(self) -> None:
        blocks = (self.block_m, self.block_n, self.block_k)
        if any(block < 16 or block & (block - 1) for block in blocks):
            raise FluxError(f"block sizes must be powers of two of at least 16, got {blocks}")
        if min(self.group_m, self.num_stages, self.num_warps) < 1:
            raise FluxError(f"group_m, num_stages and num_warps must be at least 1, got {self}")


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability. A CPU (the interpreter) counts as the least: portable and small."""
    return (8, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


def tiles_for(capability: tuple[int, int], rows: int, n: int, k: int) -> list[GemmConfig]:
    """Tiles worth timing on such a device, the likely best first.

    rows  of one tile grid (the shard of a rank); [rows, k] times a weight of n columns
    """
    low, high = _HOPPER if capability >= HOPPER else _AMPERE
    tiles = low if rows <= 64 else high
    described = n % 8 == 0 and k % 8 == 0  # rows of a multiple of 16 bytes
    return [
        tile for tile in tiles if tile.engine == "portable" or (capability == HOPPER and described)
    ]


# For up to 64 rows, and for more. On an H200 the Hopper engine's tiles of 128 x 256 reached 0.98 to
# 1.07 of cuBLAS where they fill the device several times, in groups of 4 or 16 tile rows by shape;
# those of 128 x 128 are for shapes with few tiles (benchmarks/flux_gemm.py; 256 x 128 never won).
# Few rows read the weight once and do little else: deep steps keep many bytes in flight.
_HOPPER = (
    [
        GemmConfig(block_m=64, block_n=128, block_k=128, num_stages=4, num_warps=4),
        GemmConfig(block_m=64, block_n=64, block_k=128, num_stages=5, num_warps=4),
        GemmConfig(block_m=16, block_n=128, block_k=128, num_stages=4, num_warps=4),
    ],
    [
        GemmConfig("hopper", group_m=4),
        GemmConfig("hopper", block_n=128, num_stages=5),
        GemmConfig("hopper", group_m=16),
        GemmConfig(),
        GemmConfig(block_n=128, num_stages=4),
    ],
)
# Without descriptors. Chosen by registers and shared memory; their speed is not measured.
_AMPERE = (
    [
        GemmConfig(block_m=64, block_n=64, num_stages=5, num_warps=4, tma=False),
        GemmConfig(block_m=16, block_n=128, num_stages=4, num_warps=4, tma=False),
    ],
    [
        GemmConfig(block_n=128, block_k=32, num_stages=4, tma=False),
        GemmConfig(block_m=64, block_n=128, num_stages=4, num_warps=4, tma=False),
        GemmConfig(block_m=64, block_n=256, block_k=32, num_stages=4, tma=False),
    ],
)
