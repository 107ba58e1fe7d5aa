"""Effects compose by factors and sums, and refuse what no machine does."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megascale.errors import ConfigError
from megascale.plan.effects.effects import NO_EFFECTS, Effects, NetworkShare, combine
from megascale.plan.effects.interval import interval_of


def test_none_changes_nothing() -> None:
    assert combine([]) == NO_EFFECTS == combine([NO_EFFECTS, NO_EFFECTS])
    assert NO_EFFECTS.network_share.of("data") == 1.0
    one = Effects(NetworkShare(data=0.5), 1.02, 0.3, 0.1)
    assert combine([NO_EFFECTS, one]) == one


def test_factors_multiply_and_seconds_add() -> None:
    one = Effects(NetworkShare(data=0.5, pipeline=0.8), 1.02, 0.3, 0.1)
    other = Effects(NetworkShare(tensor=0.9, data=0.5), 1.1, 0.2)
    both = combine([one, other])
    assert both.network_share == NetworkShare(tensor=0.9, data=0.25, pipeline=0.8)
    assert both.compute_factor == pytest.approx(1.122)
    assert both.launch_skew_s == pytest.approx(0.5)
    assert both.fixed_s == 0.1
    assert combine([other, one]) == both


def test_tied_embeddings_cross_as_a_pipeline_does() -> None:
    share = NetworkShare(tensor=0.9, data=0.7, pipeline=0.6)
    assert [share.of(a) for a in ("tensor", "data", "pipeline", "embedding")] == [
        0.9,
        0.7,
        0.6,
        0.6,
    ]


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"network share of axis data is 0.0; legal is more"):
        NetworkShare(data=0.0)
    with pytest.raises(ConfigError, match=r"network share of axis pipeline is 1.5"):
        NetworkShare(pipeline=1.5)
    with pytest.raises(ConfigError, match=r"compute_factor is 0.9; legal is 1"):
        Effects(compute_factor=0.9)
    with pytest.raises(ConfigError, match="launch_skew_s is nan"):
        Effects(launch_skew_s=math.nan)
    with pytest.raises(ConfigError, match=r"fixed_s is -1.0; legal is 0 seconds"):
        Effects(fixed_s=-1.0)


def test_an_interval_holds_nine_of_ten() -> None:
    found = interval_of(np.linspace(0.0, 100.0, 101))
    assert (found.low, found.value, found.high) == (5.0, 50.0, 95.0)
    assert str(found) == "50.000 (5.000 to 95.000)"
