"""What passes through samples, and what happens between them."""

from __future__ import annotations

from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.plan.machine.surface import Line, Surface

LOGS = st.floats(-3, 3)
POINTS = st.lists(st.tuples(LOGS, LOGS, st.floats(-0.3, 0.3)), min_size=1, max_size=12)


def test_a_surface_is_exact_at_samples_and_in_the_middle_between_them() -> None:
    surface = Surface([(0.0,), (1.0,)], [1.0, exp(0.2)], slope=0.3)
    assert surface.factor((0.0,)) == pytest.approx(1.0)
    assert surface.factor((1.0,)) == pytest.approx(exp(0.2))
    assert surface.factor((0.5,)) == pytest.approx(exp(0.1))
    assert surface.factor((50.0,)) == pytest.approx(exp(0.2))


def test_samples_that_contradict_each_other_are_halved() -> None:
    assert Surface([(0.0,), (0.0,)], [1.0, exp(0.1)], 0.3).factor((0.0,)) == pytest.approx(
        exp(0.05)
    )


@given(POINTS, st.tuples(LOGS, LOGS), st.tuples(LOGS, LOGS), st.floats(0.01, 0.5))
def test_a_surface_is_nowhere_steeper_than_its_slope(
    points: list[tuple[float, float, float]],
    here: tuple[float, float],
    there: tuple[float, float],
    slope: float,
) -> None:
    surface = Surface([(x, y) for x, y, _ in points], [exp(z) for _, _, z in points], slope)
    distance = sum(abs(a - b) for a, b in zip(here, there, strict=True))
    assert abs(log(surface.factor(here) / surface.factor(there))) <= slope * distance + 1e-9


def test_a_line_is_straight_in_logarithms_and_keeps_its_rate_beyond_them() -> None:
    line = Line([(100.0, 1e-5), (10_000.0, 4e-5), (100.0, 3e-5)], at_zero_s=1e-5)
    assert line.seconds(0.0) == pytest.approx(1e-5)
    assert line.seconds(50.0) == pytest.approx(1.5e-5)
    assert line.seconds(100.0) == pytest.approx(2e-5)  # the mean of two
    assert line.seconds(1000.0) == pytest.approx((2e-5 * 4e-5) ** 0.5)
    assert line.seconds(30_000.0) == pytest.approx(12e-5)


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1.0)), min_size=1, max_size=10),
    st.floats(0, 2e9),
    st.floats(0, 2e9),
)
def test_a_line_never_falls(samples: list[tuple[float, float]], one: float, two: float) -> None:
    line = Line(samples, at_zero_s=1e-5)
    assert line.seconds(min(one, two)) <= line.seconds(max(one, two)) * (1 + 1e-9)
