"""The price of a matrix product, from few numbers that mean something.

A GPU computes a product in tiles, a wave of tiles at a time on its SMs, each tile as deep as the
product plus what starting and storing it cost. That is most of what efficiency depends on:

    seconds = floor + max(matrix time, memory time)
    matrix time = min over tile shapes of
        waves x 2 x tile x SMs x (depth + half_depth + depth of storing) / (peak x share)

`waves` lies between tiles / SMs (as if the last wave cost its part) and that rounded up (as if
every wave cost the same); `rounding` says where: under a power limit the part-filled wave runs at
higher clocks. Storing is hidden in part: 2 bytes an element, 8 where a weight gradient is added to
fp32 sums, which is why weight gradients over few tokens are slow. Every factor grows with every
size, so the price does too.
"""

from __future__ import annotations

from math import ceil, log

from pydantic import Field

from megascale.plan.machine.sourced import Sourced
from megascale.plan.work.operations import Direction, Gemm

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_LARGE_TILE_EDGES = 1.0 / 128 + 1.0 / 256


class GemmCurve(Sourced):
    """What a matrix product reaches of the device's peak, and what it loses where it is small."""

    share: float = Field(gt=0.0, le=1.0, description="of the peak, by a very large product")
    dgrad: float = Field(1.0, gt=0.0, le=1.5, description="rate of input gradients to forward's")
    wgrad: float = Field(1.0, gt=0.0, le=1.5, description="rate of weight gradients to forward's")
    half_depth: float = Field(ge=0.0, description="depth that starting a tile costs")
    tile_loss: float = Field(ge=0.0, description="elements of a tile's edge lost; small tiles pay")
    storing: float = Field(
        ge=0.0, le=1.5, description="share of the time to store a result that is not hidden"
    )
    rounding: float = Field(ge=0.0, le=1.0, description="1: a part-filled wave costs a whole one")
    sustained: float = Field(
        1.0, gt=0.0, le=1.0, description="rate in a training step to that of the samples"
    )
    floor_s: float = Field(ge=0.0, description="of a kernel, however small; the gap before it")

    def rate(self, direction: Direction, peak_flops: float) -> float:
        """FLOP/s of very large products."""
        factors = {Direction.DGRAD: self.dgrad, Direction.WGRAD: self.wgrad}
        return peak_flops * min(1.0, self.share * factors.get(direction, 1.0))

    def storing_depth(self, gemm: Gemm, peak_flops: float, bytes_per_s: float) -> float:
        """Depth that takes as long as what is not hidden of storing the result."""
        rate = self.rate(gemm.direction, peak_flops)
        return self.storing * result_bytes(gemm) * rate / (2.0 * bytes_per_s)

    def matrix_s(
        self,
        gemm: Gemm,
        peak_flops: float,
        bytes_per_s: float,
        num_sms: int,
        sustained: float = 1.0,
    ) -> float:
        """Seconds of the tensor cores, on `num_sms` SMs that together have `peak_flops`.

        sustained  of their rate; storing is not slowed
        """
        elements = min(self._tiled(gemm, *tile, num_sms) for tile in TILES)
        depth = (gemm.depth + self.half_depth) / sustained
        depth += self.storing_depth(gemm, peak_flops, bytes_per_s)
        return 2.0 * elements * depth / self.rate(gemm.direction, peak_flops)

    def _tiled(self, gemm: Gemm, tile_rows: int, tile_columns: int, num_sms: int) -> float:
        """Elements of output that the whole device pays for, in tiles of this shape."""
        tiles = ceil(gemm.rows / tile_rows) * ceil(gemm.columns / tile_columns)
        a_wave = tile_rows * tile_columns * num_sms
        exact = gemm.rows * gemm.columns / a_wave
        waves = ceil(tiles / num_sms) ** self.rounding * exact ** (1.0 - self.rounding)
        edges = 1.0 / tile_rows + 1.0 / tile_columns - _LARGE_TILE_EDGES
        return waves * a_wave * (1.0 + self.tile_loss * edges)

    @property
    def slope(self) -> float:
        """Of a correction by samples in log sizes: less steep than the price, which must grow."""
        return min(0.3, 1.0 - self.rounding)

    def coordinates(
        self, gemm: Gemm, peak_flops: float, bytes_per_s: float
    ) -> tuple[float, float, float]:
        """In which a correction by samples is smooth."""
        depth = gemm.depth + self.half_depth
        depth += self.storing_depth(gemm, peak_flops, bytes_per_s)
        return log(gemm.rows), log(gemm.columns), log(depth)


def result_bytes(gemm: Gemm) -> int:
    """Moved for an element of the result; weight gradients are added to fp32: read and written."""
    return 8 if gemm.direction is Direction.WGRAD else gemm.dtype_bytes


def gemm_bytes(gemm: Gemm) -> float:
    """Least bytes of device memory: operands once and the result once."""
    operands = (gemm.rows + gemm.columns) * gemm.depth * gemm.dtype_bytes
    return float(operands + gemm.rows * gemm.columns * result_bytes(gemm))
