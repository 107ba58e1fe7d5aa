"""Generation with the key-value cache equals full recomputation."""

from __future__ import annotations

import pytest
import torch

from megascale.errors import ConfigError
from megascale.model.cache import KeyValueCache
from megascale.model.context import make_context
from tests.model.builders import build, random_tokens, tiny


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-llama", "tiny-mistral", "tiny-qwen3"])
@pytest.mark.parametrize("block", ["serial", "parallel"])
@torch.no_grad()
def test_steps_with_the_cache_equal_one_pass(preset: str, block: str) -> None:
    cfg = tiny(preset, block=block)
    model, tokens = build(cfg), random_tokens(cfg, 2, 30)
    expected = model(tokens.flatten(), make_context(2, 30)).view(2, 30, -1)
    cache, start = KeyValueCache(max_len=32), 0
    for length in (20, 1, 1, 5, 3):  # a prompt, tokens, several at once
        ctx = make_context(2, length, start=start)
        part = model(tokens[:, start : start + length].flatten(), ctx, cache)
        stop = start + length
        torch.testing.assert_close(part.view(2, length, -1), expected[:, start:stop])
        start = stop
    assert cache.length == 30


@torch.no_grad()
def test_a_full_cache_and_a_short_table_are_refused() -> None:
    cfg = tiny("tiny-gpt")
    model, tokens = build(cfg, num_positions=8), random_tokens(cfg, 1, 8).flatten()
    cache = KeyValueCache(max_len=16)
    model(tokens, make_context(1, 8), cache)
    with pytest.raises(ConfigError, match="9 positions asked"):
        model(tokens[:1], make_context(1, 1, start=8), cache)
    small = KeyValueCache(max_len=4)
    with pytest.raises(ValueError, match="holds 4 positions, asked to hold 8"):
        model(tokens, make_context(1, 8), small)
