"""The roof: its FLOPs are those of MFU, and it runs."""

from __future__ import annotations

import pytest
import torch

from megascale.config import load_config
from megascale.topology import Mesh
from megascale.train.bench.roof import measure_roof, share_of

SMALL = [
    *("model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.vocab_size=128"),
    *("model.ffn_hidden_size=64", "training.seq_len=16", "training.micro_batch_size=2"),
]


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_its_products_are_those_that_mfu_counts(block: str, tp: int, activation: str) -> None:
    config = load_config(None, [*SMALL, f"model.block={block}", f"model.activation={activation}"])
    share = share_of(config, Mesh(tensor=tp))
    weights = share.layers * sum(n * k for n, k in share.linears) + share.head[0] * share.head[1]
    queries, _, size = share.heads
    attention = 12 * share.layers * queries * size * 16 * share.tokens
    assert share.flops == 6 * share.tokens * weights + attention
    assert len(share.linears) == (3 if block == "parallel" else 4)


def test_it_runs_for_about_the_time_that_was_asked() -> None:
    config = load_config(None, [*SMALL, "model.num_kv_heads=2"])
    roof = measure_roof(config, Mesh(), torch.device("cpu"), warm_up_s=0.01, round_s=0.01, rounds=3)
    assert 0 < roof.seconds < 1
    assert roof.tflops * 1e12 == pytest.approx(share_of(config, Mesh()).flops / roof.seconds)


def test_a_window_is_in_its_flops() -> None:
    config = load_config(None, [*SMALL, "model.attention_window=4"])
    full = load_config(None, SMALL)
    assert share_of(config, Mesh()).flops < share_of(full, Mesh()).flops
