"""The same function as `transformers`, with weights and configuration mapped both ways."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.errors import CheckpointError, ConfigError
from megascale.model.context import make_context
from megascale.model.hf import from_hf, hf_family, hf_tensors, to_hf
from megascale.model.hf_config import hf_config, model_config_from_hf
from megascale.model.initialise import logical_tensors
from megascale.model.shapes import logical_parameters
from megascale.model.transformer import TransformerChunk
from megascale.ops.cross_entropy import cross_entropy
from tests.model.builders import build, random_tokens, tiny

BATCH, SEQ_LEN, POSITIONS = 2, 40, 64
SCALING = {"rope_scaling": {"factor": 8.0, "original_max_seq_len": 32}}
CASES: dict[str, ModelConfig] = {
    "gpt2": tiny("tiny-gpt"),
    "gpt2-untied-erf": tiny("tiny-gpt", tie_embeddings=False, activation="gelu"),
    "llama": tiny("tiny-llama"),
    "llama3.1": tiny("tiny-llama", **SCALING),
    "llama-biased": tiny("tiny-llama", bias="all"),
    "mistral": tiny("tiny-mistral"),
    "qwen2": tiny("tiny-qwen2"),
    "qwen2-window": tiny("tiny-qwen2", attention_window=7),
    "qwen3": tiny("tiny-qwen3"),
}
cases = pytest.mark.parametrize("name", CASES)


def _theirs(cfg: ModelConfig, state: dict[str, Tensor]) -> Any:
    transformers = pytest.importorskip("transformers")
    content = json.loads(json.dumps(hf_config(cfg, num_positions=POSITIONS)))
    config_class = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    config_class._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config_class)
    loaded = model.load_state_dict(state, strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= ({"lm_head.weight"} if cfg.tie_embeddings else set())
    model.tie_weights()
    return model.eval()


def _logits(model: TransformerChunk, tokens: Tensor) -> Tensor:
    y: Tensor = model(tokens.flatten(), make_context(*tokens.shape))
    return y.view(*tokens.shape, -1)


@cases
def test_logits_and_loss_equal_transformers(name: str) -> None:
    cfg = CASES[name]
    model = build(cfg, POSITIONS, torch.float32)
    theirs = _theirs(cfg, to_hf(cfg, logical_tensors(model)))
    tokens = random_tokens(cfg, BATCH, SEQ_LEN)
    with torch.no_grad():
        logits, expected = _logits(model, tokens), theirs(tokens, labels=tokens)
    assert expected.logits.std() > 0.1
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)
    shifted = tokens.roll(-1, dims=1).flatten()
    mask = torch.ones(BATCH, SEQ_LEN)
    mask[:, -1] = 0
    loss = cross_entropy(logits.flatten(0, 1), shifted, mask.flatten()) / mask.sum()
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_gradients_equal_transformers(name: str) -> None:
    cfg = CASES[name]
    model = build(cfg, POSITIONS, torch.float32)
    theirs = _theirs(cfg, to_hf(cfg, logical_tensors(model)))
    tokens = random_tokens(cfg, BATCH, SEQ_LEN)
    weights = torch.randn(BATCH, SEQ_LEN, cfg.vocab, generator=torch.Generator().manual_seed(2))
    (_logits(model, tokens) * weights).mean().backward()
    (theirs(tokens).logits * weights).mean().backward()
    shapes = logical_parameters(cfg, POSITIONS)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad  # `logical_tensors` now shows the gradients
    ours = logical_tensors(model)
    expected = dict(theirs.named_parameters())
    for tensor in hf_tensors(cfg):
        for part, grad in tensor.split(expected[tensor.name].grad, shapes):
            torch.testing.assert_close(ours[part], grad, rtol=1e-5, atol=1e-6, msg=part)


@cases
def test_tensors_make_the_round_trip(name: str) -> None:
    cfg = CASES[name]
    logical = logical_tensors(build(cfg, POSITIONS))
    back = from_hf(cfg, POSITIONS, to_hf(cfg, logical))
    assert back.keys() == logical.keys()
    for key, value in logical.items():
        assert torch.equal(back[key], value), key


@cases
def test_configuration_makes_the_round_trip(name: str) -> None:
    cfg = CASES[name]
    back = model_config_from_hf(json.loads(json.dumps(hf_config(cfg, num_positions=POSITIONS))))
    changes = {"preset": None, "max_seq_len": POSITIONS, "num_kv_heads": cfg.kv_heads}
    if hf_family(cfg) == "gpt2":
        changes["num_kv_heads"] = None
    else:
        changes["head_dim"] = cfg.dim_per_head
    changes["ffn_hidden_size"] = cfg.ffn_size
    assert back == cfg.model_copy(update=changes)


@pytest.mark.parametrize("name", ["gpt2", "llama3.1", "mistral", "qwen2", "qwen3"])
def test_reads_what_transformers_writes(name: str) -> None:
    cfg = CASES[name]
    model = build(cfg, POSITIONS, torch.float32)
    theirs = _theirs(cfg, to_hf(cfg, logical_tensors(model)))
    written = json.loads(theirs.config.to_json_string())
    read = model_config_from_hf(written)
    logical = from_hf(read, POSITIONS, theirs.state_dict())
    for key, value in logical_tensors(model).items():
        assert torch.equal(logical[key], value), key


def test_original_gpt2_files_have_bare_names_and_mask_buffers() -> None:
    cfg = CASES["gpt2"]
    state = to_hf(cfg, logical_tensors(build(cfg, POSITIONS)))
    bare = {name.removeprefix("transformer."): value for name, value in state.items()}
    bare["h.0.attn.bias"] = torch.ones(1)
    assert from_hf(cfg, POSITIONS, bare).keys() == logical_parameters(cfg, POSITIONS).keys()


def test_weights_that_do_not_fit_are_named() -> None:
    cfg = CASES["llama"]
    state = to_hf(cfg, logical_tensors(build(cfg, POSITIONS)))
    extra = {**state, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    with pytest.raises(CheckpointError, match=r"1 without a place \(model.layers.0.self_attn.q_p"):
        from_hf(cfg, POSITIONS, extra)
    del extra["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(model.norm.weight\)"):
        from_hf(cfg, POSITIONS, extra)
    state["model.norm.weight"] = torch.zeros(63)
    with pytest.raises(CheckpointError, match=r"has shape \(63,\)"):
        from_hf(cfg, POSITIONS, state)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block": "parallel"}, "model.block = 'parallel'"),
        ({"norm": "layernorm"}, "model.norm = 'layernorm'"),
        ({"qk_norm": True, "bias": "qkv"}, "model.bias = 'qkv'|model.qk_norm = True"),
        ({"position": "learned"}, "model.position = 'learned'"),
    ],
)
def test_models_that_no_family_computes_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        hf_config(tiny("tiny-llama", **changes), num_positions=POSITIONS)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("llama", {"model_type": "mamba"}, "model_type 'mamba'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama", {"attention_bias": True}, "mlp_bias = False"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ("llama", {"hidden_size": None}, "no 'hidden_size'"),
        ("qwen2-window", {"layer_types": ["full_attention", "sliding_attention"]}, "mixes"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx = True"),
    ],
)
def test_foreign_configurations_that_we_cannot_compute_are_refused(
    name: str, changes: dict[str, Any], named: str
) -> None:
    config = hf_config(CASES[name], num_positions=POSITIONS) | changes
    with pytest.raises(ConfigError, match=named):
        model_config_from_hf(config)
