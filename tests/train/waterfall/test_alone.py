"""Linears alone do in backward what the run's do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megascale.config import load_config
from megascale.train.waterfall.alone import _work_of
from tests.train.waterfall.measured import SMALL


@pytest.mark.parametrize(
    ("settings", "keeps_gathered"),
    [
        ([], None),
        (["parallelism.join_weight_gradients=2"], True),
        (["parallelism.pipeline_schedule=zb_h1"], False),
        (["parallelism.pipeline_schedule=zb_h1", "parallelism.join_weight_gradients=2"], True),
    ],
)
def test_weight_gradients_are_put_off_as_in_the_run(
    settings: list[str], keeps_gathered: bool | None
) -> None:
    """Joined ones keep what backward has gathered: the copy is the linear's time, and exposes
    nothing."""
    stages = "parallelism.pipeline_parallel_size=2"
    assembly: Any = SimpleNamespace(config=load_config(None, [*SMALL, stages, *settings]))
    work = _work_of(assembly)
    assert (None if work is None else work.keeps_gathered) is keeps_gathered
