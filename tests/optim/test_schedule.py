"""The learning rate at the edges of its phases, and without jumps between them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megascale.config import LrSchedulerConfig
from megascale.optim import learning_rate


def _rate(step: int, total_steps: int = 100, **settings: Any) -> float:
    return learning_rate(step, LrSchedulerConfig(**settings), lr=2.0, total_steps=total_steps)


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "wsd", "constant"])
def test_edges(decay_type: str) -> None:
    settings: dict[str, Any] = {"decay_type": decay_type, "warmup_steps": 10, "min_lr_factor": 0.25}
    assert _rate(0, **settings) == pytest.approx(0.2)  # lr / warmup_steps, not 0
    assert _rate(9, **settings) == _rate(10, **settings) == 2.0
    for after in (100, 101, 10_000):
        assert _rate(after, **settings) == (2.0 if decay_type == "constant" else 0.5)
    rates = [_rate(step, **settings) for step in range(10, 120)]
    assert rates == sorted(rates, reverse=True)
    steepest = 1.5 / 10 if decay_type == "wsd" else 1.5 * 1.6 / 90  # cosine: pi / 2 times linear
    assert max(a - b for a, b in itertools.pairwise(rates)) <= steepest + 1e-12


def test_middle_values() -> None:
    assert _rate(50, decay_type="linear", min_lr_factor=0.0) == pytest.approx(1.0)
    assert _rate(25, decay_type="cosine", min_lr_factor=0.0) == pytest.approx(1 + 0.5**0.5)
    assert _rate(25, decay_type="linear", min_lr_factor=0.0, decay_steps=50) == pytest.approx(1.0)
    wsd: dict[str, Any] = {"decay_type": "wsd", "decay_ratio": 0.2, "min_lr_factor": 0.0}
    assert _rate(80, **wsd) == 2.0
    assert _rate(90, **wsd) == pytest.approx(1.0)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert _rate(0) == 2.0
    assert _rate(0, total_steps=1) == 2.0


def test_a_run_shorter_than_its_warmup() -> None:
    rates = [_rate(step, total_steps=5, warmup_steps=10) for step in range(10)]
    assert rates == [pytest.approx(0.2 * (step + 1)) for step in range(10)]
    assert _rate(10, total_steps=5, warmup_steps=10) == pytest.approx(0.2)
