"""Parameter counts against published ones, and shards that add up to the whole."""

from __future__ import annotations

import pytest

from megascale.config import PRESETS, ModelConfig
from megascale.plan.parameters import (
    chunk_parameters,
    count_by_component,
    layer_parameters,
    model_parameters,
)
from megascale.plan.stages import split_layers
from megascale.shards import Placement


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("llama2-7b", 6_738_415_616),  # exact counts of the published weights
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3.1-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("gpt3-125m", 125_226_240),  # GPT-2 small's 124,439,808 + 1024 more positions
    ],
)
def test_counts_of_published_models(preset: str, count: int) -> None:
    model = ModelConfig(preset=preset)
    assert sum(p.num_elements for p in model_parameters(model, model.max_seq_len or 0)) == count


BLOCKS = [
    (preset, block)
    for preset in sorted(PRESETS)
    for block in ("serial", "parallel")
    if (block, PRESETS[preset]["bias"]) != ("parallel", "qkv")  # refused by the configuration
]


@pytest.mark.parametrize(("preset", "block"), BLOCKS)
def test_chunks_hold_every_parameter_once_and_the_tied_head_twice(preset: str, block: str) -> None:
    model = ModelConfig.model_validate({"preset": preset, "block": block})
    whole = model_parameters(model, 64)
    assert len({p.name for p in whole}) == len(whole)
    split = split_layers(model.num_layers, 4)
    pieces = [
        p
        for i, layers in enumerate(split)
        for p in chunk_parameters(model, layers, embed=i == 0, head=i == 3, num_positions=64)
    ]
    if model.tie_embeddings:
        assert pieces.pop().name == "embed.tokens.weight"
    assert pieces == whole
    assert sum(count_by_component(whole).values()) == sum(p.num_elements for p in whole)


def test_names_and_shapes_of_a_layer_by_hand() -> None:
    model = ModelConfig(
        hidden_size=8, num_heads=4, num_kv_heads=2, ffn_hidden_size=12, bias="qkv", qk_norm=True
    )
    column, row, whole = Placement.COLUMN, Placement.ROW, Placement.REPLICATED
    found = [
        (p.name.removeprefix("layers.3."), p.shape, p.placement) for p in layer_parameters(model, 3)
    ]
    assert found == [
        ("norm1.weight", (8,), whole),
        ("attn.q.weight", (8, 8), column),
        ("attn.q.bias", (8,), column),
        ("attn.k.weight", (4, 8), column),
        ("attn.k.bias", (4,), column),
        ("attn.v.weight", (4, 8), column),
        ("attn.v.bias", (4,), column),
        ("attn.q_norm.weight", (2,), whole),
        ("attn.k_norm.weight", (2,), whole),
        ("attn.o.weight", (8, 8), row),
        ("norm2.weight", (8,), whole),
        ("mlp.gate.weight", (12, 8), column),
        ("mlp.up.weight", (12, 8), column),
        ("mlp.fc2.weight", (8, 12), row),
    ]


def test_a_parallel_gpt_block_has_one_norm_and_replicated_row_biases() -> None:
    model = ModelConfig(norm="layernorm", activation="gelu", bias="all", block="parallel")
    by_name = {p.name.removeprefix("layers.0."): p for p in layer_parameters(model, 0)}
    assert "norm1.bias" in by_name
    assert not any(name.startswith("norm2") for name in by_name)
    assert by_name["mlp.fc1.bias"].placement is Placement.COLUMN
    assert by_name["mlp.fc2.bias"].placement is Placement.REPLICATED
    assert by_name["attn.o.bias"].placement is Placement.REPLICATED


def test_local_elements() -> None:
    model = ModelConfig(vocab_size=50257, hidden_size=8, num_heads=4)
    by_name = {p.name: p for p in model_parameters(model, 0)}
    assert by_name["embed.tokens.weight"].local_elements(4) == 12565 * 8  # padded to 50260 rows
    assert by_name["layers.0.attn.q.weight"].local_elements(4) == 16
    assert by_name["final_norm.weight"].local_elements(4) == 8
