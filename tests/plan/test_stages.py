"""The rule that places layers: contiguous, even, complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.errors import ConfigError
from megascale.plan.stages import split_layers


@given(st.integers(1, 40), st.integers(0, 100))
def test_no_layer_is_dropped_and_the_first_chunks_hold_the_rest(chunks: int, more: int) -> None:
    num_layers = chunks + more
    split = split_layers(num_layers, chunks)
    assert [layer for part in split for layer in part] == list(range(num_layers))
    base, larger = divmod(num_layers, chunks)
    assert [len(part) for part in split] == [base + 1] * larger + [base] * (chunks - larger)


def test_the_paper_s_530b_model_divides_by_its_105_chunks() -> None:
    assert {len(part) for part in split_layers(105, 35 * 3)} == {1}


def test_an_empty_chunk_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers cannot fill 4 chunks"):
        split_layers(3, 4)
