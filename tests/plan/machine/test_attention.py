"""The price of an attention core by hand."""

from __future__ import annotations

import pytest

from megascale.plan.machine.attention import AttentionCurve, attention_flops, kept_pairs
from megascale.plan.work.operations import Attention

CURVE = AttentionCurve(
    forward=0.5,
    backward=0.4,
    plain=0.5,
    block=1,
    half_head_dim=0.0,
    half_heads=0.0,
    floor_s=0.0,
    source="assumed: test",
)


def core(**changes: int | bool | None) -> Attention:
    sizes = {"sequences": 2, "seq_len": 1000, "heads": 8, "kv_heads": 8, "head_dim": 128}
    values = {**sizes, "window": None, "backward": False, **changes}
    return Attention("attention", **values)  # type: ignore[arg-type]


def test_pairs_are_counted_as_mask_and_window_keep_them() -> None:
    seen = [(query, key) for query in range(50) for key in range(50) if query - 7 < key <= query]
    assert kept_pairs(50, 7) == len(seen)
    assert kept_pairs(50, None) == 50 * 51 / 2


def test_useful_flops_over_the_reached_rate() -> None:
    pairs = 1000 * 1001 / 2 + 1000 / 2  # half a block, of one token, a query
    assert CURVE.matrix_s(core(), 1e14) == pytest.approx(4 * 128 * 16 * pairs / (1e14 * 0.5))
    back = CURVE.matrix_s(core(backward=True), 1e14)
    assert back == pytest.approx(10 * 128 * 16 * pairs / (1e14 * 0.4))
    assert attention_flops(core()) == 4 * 128 * 16 * 1000 * 1001 / 2


def test_the_library_s_form_is_slower_by_its_share() -> None:
    ours, plain = (CURVE.matrix_s(core(plain=plain), 1e14) for plain in (False, True))
    assert plain == pytest.approx(2 * ours)


def test_small_heads_and_few_heads_reach_less() -> None:
    curve = CURVE.model_copy(update={"half_head_dim": 32.0, "half_heads": 16.0})
    usual, small = (curve.matrix_s(core(head_dim=dim), 1e14) for dim in (128, 64))
    assert small / usual == pytest.approx((64 + 32) / (128 + 32))
    assert usual == pytest.approx(2 * CURVE.matrix_s(core(), 1e14))  # 16 heads half fill it
