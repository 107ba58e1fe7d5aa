"""The latest of many ranks: closed forms against drawn pauses and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.launch_skew import launch_skew


def test_one_rank_by_hand() -> None:
    assert launch_skew(1, chance=0.25, pause_s=2.0).value == pytest.approx(0.5)
    # two: 2 (0.25 + (1 - 0.75^2) / 2)
    assert launch_skew(2, chance=0.25, pause_s=2.0).value == pytest.approx(0.9375)
    # all pause: the largest of four exponentials, 1 + 1/2 + 1/3 + 1/4
    assert launch_skew(4, chance=1.0, pause_s=1.0).value == pytest.approx(25 / 12)


@pytest.mark.parametrize(("ranks", "chance"), [(64, 0.01), (512, 0.05)])
def test_drawn_pauses(ranks: int, chance: float) -> None:
    rng = np.random.default_rng(5)
    shape = (6000, ranks)
    latest = (rng.exponential(0.2, shape) * (rng.random(shape) < chance)).max(axis=1)
    found = launch_skew(ranks, chance=chance, pause_s=0.2)
    assert found.value == pytest.approx(latest.mean(), rel=0.03)
    assert found.low == pytest.approx(np.percentile(latest, 5), abs=0.01)
    assert found.high == pytest.approx(np.percentile(latest, 95), rel=0.04)


def test_planned_pauses_cost_a_tenth_at_the_papers_size() -> None:
    free = launch_skew(12_288, chance=0.01, pause_s=0.1)
    planned = launch_skew(12_288, chance=0.01, pause_s=0.1, planned=True)
    assert free.value == pytest.approx(0.54, abs=0.01)
    assert planned.value == pytest.approx(0.01 * 0.1 * (np.log(12_288) + 0.5772), rel=1e-3)
    # of a period of 100 steps the latest of 12,288 pauses, spread over its steps
    assert planned.high == pytest.approx(0.01 * 0.1 * -np.log(1 - 0.95 ** (1 / 12_288)))
    assert planned.low < planned.value < planned.high


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 64, 12_288])
def test_the_mean_lies_in_its_interval(ranks: int, planned: bool) -> None:
    found = launch_skew(ranks, planned=planned)
    assert found.low <= found.value <= found.high


def test_more_ranks_wait_longer_and_no_pause_is_no_wait() -> None:
    few, many = (launch_skew(n).value for n in (8, 8192))
    assert few < many
    assert launch_skew(8, chance=0.0).value == launch_skew(8, pause_s=0.0).high == 0.0


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"chance is 1.5; legal is 0 or more, at most 1"):
        launch_skew(8, chance=1.5)
    with pytest.raises(ConfigError, match="pause_s is -1"):
        launch_skew(8, pause_s=-1.0)
    with pytest.raises(ConfigError, match="num_ranks is 0"):
        launch_skew(0)
