"""Initial values: the rule of each name, and the same values in every shard."""

from __future__ import annotations

import math

import torch

from megascale.model.initialise import (
    init_rules,
    initialise,
    initialise_block_,
    logical_tensors,
)
from megascale.model.transformer import TransformerChunk
from megascale.shards import Block, Box
from tests.model.builders import tiny


def test_rules_follow_the_name() -> None:
    cfg = tiny("tiny-qwen3", bias="all", init_std=0.02)
    rule = init_rules(cfg)
    scaled = ("normal", 0.02 / math.sqrt(2 * cfg.num_layers))
    assert rule("layers.1.attn.o.weight") == scaled
    assert rule("layers.1.mlp.fc2.weight") == scaled
    assert rule("layers.1.attn.q.weight") == ("normal", 0.02)
    assert rule("embed.positions.weight") == ("normal", 0.02)
    assert rule("layers.0.attn.q_norm.weight") == ("ones",)
    assert rule("final_norm.weight") == ("ones",)
    assert rule("layers.0.norm1.bias") == rule("layers.0.attn.q.bias") == ("zeros",)
    plain = init_rules(tiny("tiny-llama", init_std=0.02, scaled_residual_init=False))
    assert plain("layers.1.mlp.fc2.weight") == ("normal", 0.02)


def test_values_have_their_distribution_and_differ_by_name() -> None:
    cfg = tiny("tiny-llama", init_std=0.02)
    model = TransformerChunk(cfg, range(2), embed=True, head=True, num_positions=8)
    initialise(model, cfg, seed=3)
    tensors = logical_tensors(model)
    assert abs(tensors["embed.tokens.weight"].std().item() / 0.02 - 1) < 0.03
    assert abs(tensors["layers.0.mlp.fc2.weight"].std().item() / 0.01 - 1) < 0.05
    assert torch.equal(tensors["layers.0.norm1.weight"], torch.ones(64))
    assert not torch.equal(tensors["layers.0.attn.k.weight"], tensors["layers.0.attn.v.weight"])
    assert not torch.equal(tensors["layers.0.attn.k.weight"], tensors["layers.1.attn.k.weight"])


def test_a_shard_and_a_chunk_begin_as_the_whole_model() -> None:
    cfg = tiny("tiny-llama")
    model = TransformerChunk(cfg, range(2), embed=True, head=True, num_positions=8)
    initialise(model, cfg, seed=3)
    whole = logical_tensors(model)
    chunk = TransformerChunk(cfg, range(1, 2), embed=False, head=True, num_positions=8)
    initialise(chunk, cfg, seed=3)
    for name, value in logical_tensors(chunk).items():
        assert torch.equal(value, whole[name]), name
    name = "layers.0.attn.q.weight"
    block = Block(name, (64, 64), Box((32, 0), (16, 64)), start=10)
    storage = torch.zeros(10 + 16 * 64)
    initialise_block_(storage, block, init_rules(cfg)(name), seed=3)
    assert torch.equal(storage[10:].view(16, 64), whole[name][32:48])
    assert not storage[:10].any()
