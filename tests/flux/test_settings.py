"""Settings of an operator that contradict one another."""

from __future__ import annotations

import pytest

from megascale.errors import FluxError
from megascale.flux import GemmAllReduce
from megascale.flux.mode import FluxMode


@pytest.mark.parametrize("mode", ["chunked", "reference"])
def test_a_view_is_refused_in_modes_that_have_none(mode: FluxMode) -> None:
    with pytest.raises(FluxError, match=f'view asks .* "auto" or "fused", got mode "{mode}"'):
        GemmAllReduce(None, view=True, mode=mode)


@pytest.mark.parametrize("mode", ["auto", "fused"])
def test_a_view_goes_with_modes_that_may_have_one(mode: FluxMode) -> None:
    assert GemmAllReduce(None, view=True, mode=mode).settings.view
