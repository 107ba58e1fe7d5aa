"""The price of a matrix product, from few numbers that mean something.

A GPU computes a product in tiles, a wave of tiles at a time on its SMs, each tile as deep as the
product plus the cost of starting and storing it. That is most of what efficiency depends on:

    seconds = floor + max(matrix time, memory time)
    matrix time = min over tile shapes of  waves x tile FLOPs x (depth + half_depth) / rate of tile

`waves` is between the number of tiles over SMs (as if the last wave cost its share) and that
rounded up (as if every wave cost the same): the power limit gives a part-filled wave higher clocks,
so the truth lies between, and `rounding` says where. Every factor grows with every size, so the
price does too.
"""

from __future__ import annotations

from math import ceil

from pydantic import Field

from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import Direction, Gemm

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))


class GemmCurve(Sourced):
    """What a matrix product reaches of the device's peak, and what it loses where it is small."""

    share: float = Field(gt=0.0, le=1.0, description="of the peak, by a very large product")
    dgrad: float = Field(1.0, gt=0.0, le=1.5, description="rate of input gradients to forward's")
    wgrad: float = Field(1.0, gt=0.0, le=1.5, description="rate of weight gradients to forward's")
    half_depth: float = Field(ge=0.0, description="depth at which half of the rate is reached")
    tile_loss: float = Field(ge=0.0, description="elements of a tile's edge lost; small tiles pay")
    rounding: float = Field(ge=0.0, le=1.0, description="1: a part-filled wave costs a whole one")
    floor_s: float = Field(ge=0.0, description="least time between two kernels")

    def rate_share(self, direction: Direction) -> float:
        """Of the peak, for very large products."""
        factors = {Direction.DGRAD: self.dgrad, Direction.WGRAD: self.wgrad}
        return min(1.0, self.share * factors.get(direction, 1.0))

    def matrix_s(self, gemm: Gemm, peak_flops: float, num_sms: int) -> float:
        """Seconds of the tensor cores, on `num_sms` SMs that together have `peak_flops`."""
        depth = gemm.depth + self.half_depth
        least = min(self._tiled(gemm, *tile, num_sms) for tile in TILES)
        return 2.0 * least * depth / (peak_flops * self.rate_share(gemm.direction))

    def _tiled(self, gemm: Gemm, tile_rows: int, tile_columns: int, num_sms: int) -> float:
        """Elements of output that the whole device pays for, in tiles of this shape."""
        tiles = ceil(gemm.rows / tile_rows) * ceil(gemm.columns / tile_columns)
        exact = gemm.rows * gemm.columns / (tile_rows * tile_columns * num_sms)
        waves = ceil(tiles / num_sms) ** self.rounding * max(exact, 1e-9) ** (1.0 - self.rounding)
        loss = 1.0 + self.tile_loss * (1.0 / tile_rows + 1.0 / tile_columns - 3.0 / 256.0)
        return waves * tile_rows * tile_columns * num_sms * loss


def gemm_bytes(gemm: Gemm) -> float:
    """Least bytes of device memory: operands once and the result once; weight gradients are added
    to fp32, which are read and written."""
    operands = (gemm.rows + gemm.columns) * gemm.depth * gemm.dtype_bytes
    result = 8 if gemm.direction is Direction.WGRAD else gemm.dtype_bytes
    return float(operands + gemm.rows * gemm.columns * result)
