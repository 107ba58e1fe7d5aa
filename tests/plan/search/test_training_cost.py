"""Days, GPU-hours and money by hand; faults by the formula of the effects."""

from __future__ import annotations

import math

import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.failures import expected_ettr
from megascale.plan.search.training_cost import check_tokens, training_cost


def test_the_papers_scale_by_hand() -> None:
    """12,288 GPUs, 2 million tokens a second, 300e9 tokens: 150,000 s."""
    found = training_cost(300e9, 2e6, 12_288, 2.0)
    assert found.days == pytest.approx(150_000 / 86_400)
    assert found.gpu_hours == pytest.approx(12_288 * 150_000 / 3600)
    assert found.cost == pytest.approx(2.0 * 12_288 * 150_000 / 3600)
    # 1,536 nodes, 3.79e-3 a node-day, 25 minutes to recover, 5 s a checkpoint, Young's interval
    mtbf_s = 86_400 / (1_536 * 3.79e-3)
    young_s = math.sqrt(2 * 5 * mtbf_s)
    by_hand = (1 - (1_500 + young_s / 2) / mtbf_s) / (1 + 5 / young_s)
    assert found.ettr == pytest.approx(by_hand)
    assert found.ettr == pytest.approx(0.875, abs=0.001), "facts: 0.875 at its best interval"
    assert found.ettr_low < found.ettr < found.ettr_high
    assert found.ettr_of["rsc-2"] > found.ettr_of["llama3"] > found.ettr_of["rsc-1"]
    assert "one in 4.1 h here" in found.assumptions[0]
    assert "recovery 25.0 min" in found.assumptions[1]


def test_without_a_price_there_is_no_cost_and_a_few_gpus_are_a_node() -> None:
    found = training_cost(1e9, 1e5, 4, None)
    assert found.cost is None
    assert found.ettr == expected_ettr(1, 3.79e-3, 1500.0, 5.0, days=found.days).value


@pytest.mark.parametrize("tokens", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_number_of_tokens_is_refused(tokens: float) -> None:
    check_tokens(None)
    check_tokens(1.0)
    with pytest.raises(ConfigError, match="a number above 0, such as 300e9"):
        check_tokens(tokens)
