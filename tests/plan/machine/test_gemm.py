"""The price of a product by hand, and what makes it grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.machine.gemm import GemmCurve, gemm_bytes
from megascale.plan.work.operations import Direction, Gemm

PEAK, SPEED, SMS = 100e12, 1e12, 100
EXACT = GemmCurve(
    share=0.8,
    half_depth=0.0,
    tile_loss=0.0,
    storing=1.0,
    rounding=1.0,
    floor_s=0.0,
    source="assumed: test",
)
SIZES = st.integers(1, 40_000)


def seconds(curve: GemmCurve, gemm: Gemm) -> float:
    return curve.matrix_s(gemm, PEAK, SPEED, SMS)


def test_whole_waves_cost_their_flops_and_their_result() -> None:
    # 25600 x 12800 is 10,000 tiles of 256 x 128: 100 waves of 100 SMs, nothing rounded
    gemm = Gemm("g", 25_600, 12_800, 4096, Direction.FORWARD)
    storing_s = 2 * 25_600 * 12_800 / SPEED
    assert seconds(EXACT, gemm) == pytest.approx(gemm.flops / (0.8 * PEAK) + storing_s)


def test_a_part_filled_wave_costs_a_whole_one_as_far_as_rounding_says() -> None:
    # 75 tiles of 256 x 128 are 3/4 of a wave of 100 SMs; smaller tiles would lose more
    gemm = Gemm("g", 256, 128 * 75, 1 << 20, Direction.FORWARD)
    whole, half, none = (
        EXACT.model_copy(update={"rounding": rounding, "tile_loss": 1000.0})
        for rounding in (1.0, 0.5, 0.0)
    )
    assert seconds(whole, gemm) / seconds(none, gemm) == pytest.approx(4 / 3, rel=1e-3)
    assert seconds(half, gemm) / seconds(none, gemm) == pytest.approx((4 / 3) ** 0.5, rel=1e-3)


def test_small_tiles_are_taken_where_large_ones_would_stand_idle() -> None:
    gemm = Gemm("g", 64, 64 * 100, 1 << 20, Direction.FORWARD)  # one wave of 64 x 64
    lossy = EXACT.model_copy(update={"tile_loss": 16.0})
    loss = 1 + 16 * (2 / 64 - 1 / 128 - 1 / 256)
    assert seconds(lossy, gemm) == pytest.approx(gemm.flops / (0.8 * PEAK) * loss, rel=1e-3)


def test_weight_gradients_read_and_write_fp32_sums() -> None:
    sizes = (25_600, 12_800, 2048)
    forward = seconds(EXACT, Gemm("g", *sizes, Direction.FORWARD))
    weights = seconds(EXACT, Gemm("g", *sizes, Direction.WGRAD))
    assert weights - forward == pytest.approx(6 * 25_600 * 12_800 / SPEED)
    hidden = EXACT.model_copy(update={"storing": 0.0})
    assert seconds(hidden, Gemm("g", *sizes, Direction.WGRAD)) == pytest.approx(
        2 * 25_600 * 12_800 * 2048 / (0.8 * PEAK)
    )
    assert gemm_bytes(Gemm("g", 10, 20, 30, Direction.WGRAD)) == 2 * (10 + 20) * 30 + 8 * 10 * 20


def test_power_slows_the_tensor_cores_and_not_the_stores() -> None:
    gemm = Gemm("g", 25_600, 12_800, 2048, Direction.WGRAD)
    slowed = EXACT.matrix_s(gemm, PEAK, SPEED, SMS, sustained=0.8)
    more_s = gemm.flops / (0.8 * PEAK) * (1 / 0.8 - 1)
    assert slowed - seconds(EXACT, gemm) == pytest.approx(more_s)


@given(
    SIZES,
    SIZES,
    SIZES,
    st.sampled_from(["rows", "columns", "depth"]),
    st.integers(1, 4000),
    st.floats(0.0, 1.0),
    st.sampled_from(list(Direction)),
)
def test_a_larger_product_never_costs_less(
    rows: int, columns: int, depth: int, which: str, more: int, rounding: float, kind: Direction
) -> None:
    curve = EXACT.model_copy(
        update={"rounding": rounding, "half_depth": 100.0, "tile_loss": 16.0, "wgrad": 0.9}
    )
    sizes = {"rows": rows, "columns": columns, "depth": depth}
    small = Gemm("g", **sizes, direction=kind)
    large = Gemm("g", **{**sizes, which: sizes[which] + more}, direction=kind)
    assert seconds(curve, large) >= seconds(curve, small) * (1 - 1e-12)
