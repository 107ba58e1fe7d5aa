"""The transformer chunk against plain formulas, and what it promises to `parallel`."""

from __future__ import annotations

import weakref
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megascale.config import ModelConfig
from megascale.errors import ConfigError
from megascale.model.context import ForwardContext, make_context
from megascale.model.initialise import logical_tensors, unsharded_blocks
from megascale.model.shapes import logical_parameters
from megascale.model.sharding import sharding_table
from megascale.model.transformer import TransformerChunk
from megascale.ops.activation import activation
from megascale.ops.cross_entropy import cross_entropy
from megascale.ops.random import stream_key
from tests.model.builders import build, random_tokens, tiny

BATCH, SEQ_LEN = 2, 24
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {"preset": "tiny-gpt"},
    "gpt-parallel": {"preset": "tiny-gpt", "block": "parallel"},
    "llama": {"preset": "tiny-llama"},
    "llama-parallel": {"preset": "tiny-llama", "block": "parallel"},
    "mistral": {"preset": "tiny-mistral"},
    "qwen2": {"preset": "tiny-qwen2"},
    "qwen3": {"preset": "tiny-qwen3"},
    "qwen3-parallel": {"preset": "tiny-qwen3", "block": "parallel"},
}
variants = pytest.mark.parametrize("name", VARIANTS)


def _loss(model: TransformerChunk, tokens: Tensor, ctx: ForwardContext) -> Tensor:
    logits = model(tokens.flatten(), ctx)
    return cross_entropy(logits, tokens.roll(-1, dims=1).flatten(), torch.ones(tokens.numel()))


def _run(cfg: ModelConfig, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one micro-batch."""
    model, tokens = build(cfg), random_tokens(cfg, BATCH, SEQ_LEN)
    loss = _loss(model, tokens, make_context(BATCH, SEQ_LEN, **options))
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


@variants
def test_chunk_declares_the_logical_parameters(name: str) -> None:
    cfg = tiny(**VARIANTS[name])
    tensors = logical_tensors(build(cfg, num_positions=40))
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    assert shapes == logical_parameters(cfg, num_positions=40)


@variants
def test_every_module_with_parameters_has_a_placement(name: str) -> None:
    cfg = tiny(**VARIANTS[name])
    rows = [pattern for pattern, _ in sharding_table(cfg)]
    used = set()
    for path, module in build(cfg).named_modules():
        if list(module.parameters(recurse=False)):
            matches = [pattern for pattern in rows if fnmatch(path, pattern)]
            assert len(matches) == 1, (path, matches)
            used.update(matches)
    unused = set(rows) - used
    assert unused <= {"embed.positions", "layers.*.attn.q_norm", "layers.*.attn.k_norm"}


@variants
def test_units_hold_every_parameter_once_and_are_announced(name: str) -> None:
    cfg = tiny(**VARIANTS[name])
    model = build(cfg)
    announced = []

    def note(unit: str, x: Tensor) -> Tensor:
        announced.append(unit)
        return x

    model.before_unit = note
    model(random_tokens(cfg, 1, 8).flatten(), make_context(1, 8))
    assert (
        announced
        == [unit for unit, _ in model.units()]
        == ["embed", "layers.0", "layers.1", "head"]
    )
    seen: list[int] = []
    for _, paths in model.units():
        for path in paths:
            seen += [id(p) for p in model.get_submodule(path).parameters() if id(p) not in seen]
    assert len(seen) == len(set(seen)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["gpt", "llama-parallel"])
def test_a_boundary_tells_of_its_unit_before_the_unit_below_begins(name: str) -> None:
    """Backward: the sum of two units is one operator's; the order of events is as without it."""
    cfg = tiny(**VARIANTS[name])
    model = build(cfg)
    events: list[str] = []

    def note(unit: str, x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        x = x.view_as(x)
        x.register_hook(lambda grad: events.append(f"behind {unit} done"))
        return x

    model.before_unit = note
    for number, layer in model.layers.items():
        for parameter in layer.parameters():
            parameter.register_hook(lambda grad, number=number: events.append(f"layers.{number}"))
    model(random_tokens(cfg, 1, 8).flatten(), make_context(1, 8)).sum().backward()
    assert list(dict.fromkeys(events)) == [
        "behind head done",
        "layers.1",
        "behind layers.1 done",
        "layers.0",
        "behind layers.0 done",
    ]
    assert events.index("behind layers.1 done") == len(events) - 2 - events.count("layers.0")


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen3-parallel"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_plain_operators_compute_the_same(name: str, recompute: Any) -> None:
    cfg = tiny(**VARIANTS[name], hidden_dropout=0.1)
    options = {"sample_numbers_B": torch.tensor([7, 3]), "dropout_seed": 5}
    loss, grads = _run(cfg, **options)
    plain_loss, plain_grads = _run(cfg, **options, recompute=recompute, operators="plain")
    torch.testing.assert_close(plain_loss, loss)
    for grad, expected in zip(plain_grads, grads, strict=True):
        torch.testing.assert_close(grad, expected)


@variants
def test_meta_construction_allocates_nothing(name: str) -> None:
    cfg = tiny(**VARIANTS[name])
    model = TransformerChunk(
        cfg, range(2), embed=True, head=True, num_positions=8, device="meta", dtype=torch.bfloat16
    )
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sum(len(blocks) for _, blocks in unsharded_blocks(model)) == len(
        logical_parameters(cfg, 8)
    )


@pytest.mark.parametrize("name", ["gpt", "llama-parallel"])
def test_chunks_in_sequence_are_the_model(name: str) -> None:
    cfg = tiny(**VARIANTS[name], tie_embeddings=False)
    whole, tokens = build(cfg), random_tokens(cfg, BATCH, SEQ_LEN).flatten()
    first = TransformerChunk(
        cfg, range(1), embed=True, head=False, num_positions=64, dtype=torch.float64
    )
    last = TransformerChunk(
        cfg, range(1, 2), embed=False, head=True, num_positions=64, dtype=torch.float64
    )
    state = whole.state_dict()
    for chunk in (first, last):
        chunk.load_state_dict({key: state[key] for key in chunk.state_dict()})
    ctx = make_context(BATCH, SEQ_LEN)
    assert torch.equal(last(first(tokens, ctx), ctx), whole(tokens, ctx))


def test_parallel_block_is_the_plain_formula() -> None:
    cfg = tiny("tiny-gpt", block="parallel", num_layers=1)
    model = build(cfg)
    w = {key.removeprefix("layers.0."): t for key, t in logical_tensors(model).items()}
    x = torch.randn(BATCH, SEQ_LEN, cfg.hidden_size, dtype=torch.float64)

    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    normed = F.layer_norm(x, (cfg.hidden_size,), w["norm1.weight"], w["norm1.bias"])
    q, k, v = (
        project(f"attn.{part}", normed).unflatten(-1, (cfg.num_heads, -1)).transpose(1, 2)
        for part in "qkv"
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    mlp = project("mlp.fc2", F.gelu(project("mlp.fc1", normed), approximate="tanh"))
    expected = x + mlp + project("attn.o", attended)
    stream, branch = model.layers["0"](x.flatten(0, 1), make_context(BATCH, SEQ_LEN))
    torch.testing.assert_close(stream + branch, expected.flatten(0, 1))


def test_tied_embeddings_are_one_parameter_with_both_gradients() -> None:
    tied, untied = tiny("tiny-gpt"), tiny("tiny-gpt", tie_embeddings=False)
    model, other = build(tied), build(untied)
    assert model.head is not None
    assert model.embed is not None
    assert model.head.weight is model.embed.tokens.weight
    state = model.state_dict()
    other.load_state_dict({**state, "head.weight": state["embed.tokens.weight"]})
    tokens, ctx = random_tokens(tied, BATCH, SEQ_LEN), make_context(BATCH, SEQ_LEN)
    _loss(model, tokens, ctx).backward()
    _loss(other, tokens, ctx).backward()
    assert other.head is not None
    assert other.embed is not None
    both = [p.grad for p in (other.head.weight, other.embed.tokens.weight)]
    assert both[0] is not None
    assert both[1] is not None
    torch.testing.assert_close(model.head.weight.grad, both[0] + both[1])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["gpt", "llama", "qwen3-parallel"])
def test_recomputation_changes_nothing(name: str, dropout: float) -> None:
    cfg = tiny(**VARIANTS[name], hidden_dropout=dropout, attention_dropout=dropout)
    options = {"sample_numbers_B": torch.tensor([7, 3]), "dropout_seed": 5}
    loss, grads = _run(cfg, **options)
    for recompute in ("selective", "full"):
        same_loss, same_grads = _run(cfg, **options, recompute=recompute)
        assert torch.equal(same_loss, loss)
        for grad, expected in zip(same_grads, grads, strict=True):
            assert torch.equal(grad, expected)


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recomputation_frees_the_activated_tensor(
    recompute: Any, block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny("tiny-gpt", block=block)
    model = build(cfg)
    made: list[weakref.ref[Tensor]] = []

    def note(name: str, h_Tf: Tensor, *rest: Any) -> Tensor:
        a_Tf = activation(name, h_Tf, *rest)
        made.append(weakref.ref(a_Tf))
        return a_Tf

    monkeypatch.setattr("megascale.model.block.activation", note)
    y = model(random_tokens(cfg, 1, 8).flatten(), make_context(1, 8, recompute=recompute))
    alive = [ref() is not None for ref in made]
    assert alive == [recompute == "none"] * cfg.num_layers
    y.sum().backward()


def test_dropout_depends_on_sample_numbers_and_seed_alone() -> None:
    cfg = tiny("tiny-gpt", hidden_dropout=0.3, attention_dropout=0.3)
    model, tokens = build(cfg), random_tokens(cfg, 2, 8)

    def logits(samples: list[int], rows: list[int], seed: int | None) -> Tensor:
        numbers = torch.tensor(samples)
        ctx = make_context(len(samples), 8, sample_numbers_B=numbers, dropout_seed=seed)
        y: Tensor = model(tokens[rows].flatten(), ctx)
        return y.view(len(samples), 8, -1)

    both = logits([10, 20], [0, 1], 1)
    torch.testing.assert_close(logits([20, 10], [1, 0], 1).flip(0), both)
    torch.testing.assert_close(logits([20], [1], 1)[0], both[1])
    assert not torch.allclose(logits([11, 20], [0, 1], 1)[0], both[0])
    assert not torch.allclose(logits([10, 20], [0, 1], 2), both)
    torch.testing.assert_close(
        logits([10, 20], [0, 1], None), logits([1, 2], [0, 1], None), rtol=0, atol=0
    )


@pytest.mark.parametrize("preset", ["tiny-gpt", "tiny-mistral"])
def test_training_after_inference_mode_uses_the_same_cached_tensors(preset: str) -> None:
    cfg = tiny(preset, hidden_dropout=0.1, attention_dropout=0.1)
    model, tokens = build(cfg), random_tokens(cfg, 1, 9)  # a length that no other test uses
    ctx = make_context(1, 9, sample_numbers_B=torch.tensor([1]), dropout_seed=1)
    with torch.inference_mode():
        evaluated = _loss(model, tokens, ctx)
    loss = _loss(model, tokens, ctx)
    loss.backward()
    assert loss.item() == evaluated.item()


def test_dropout_sites_have_their_own_streams() -> None:
    sites = ["embed.dropout", "layers.0.attn.dropout", "layers.0.mlp.dropout", "layers.1.dropout"]
    assert len({stream_key(1, site) for site in sites}) == len(sites)


def test_positions_beyond_the_table_are_refused() -> None:
    cfg = tiny("tiny-gpt")
    model = build(cfg, num_positions=8)
    with pytest.raises(ConfigError, match="9 positions asked of a model with 8 learned"):
        model(random_tokens(cfg, 1, 9).flatten(), make_context(1, 9))


@pytest.mark.parametrize("name", ["gpt", "qwen3", "mistral", "llama-parallel"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_bf16_runs_and_is_close(name: str, recompute: Any) -> None:
    cfg = tiny(**VARIANTS[name], init_std=0.02)
    tokens, ctx = random_tokens(cfg, BATCH, SEQ_LEN), make_context(BATCH, SEQ_LEN)
    low = build(cfg, dtype=torch.bfloat16)
    low_ctx = make_context(BATCH, SEQ_LEN, recompute=recompute)
    logits = low(tokens.flatten(), low_ctx)
    assert logits.dtype == torch.bfloat16
    expected = build(cfg)(tokens.flatten(), ctx)
    torch.testing.assert_close(logits.double(), expected, rtol=0.1, atol=0.1)
    _loss(low, tokens, low_ctx).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in low.parameters())


def test_main_gradients_of_bf16_match_ordinary_gradients() -> None:
    cfg = tiny("tiny-llama", block="parallel")
    tokens = random_tokens(cfg, BATCH, SEQ_LEN)
    plain, main = build(cfg, dtype=torch.bfloat16), build(cfg, dtype=torch.bfloat16)
    for parameter in main.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    for model in (plain, main):
        _loss(model, tokens, make_context(BATCH, SEQ_LEN, recompute="full")).backward()
    for expected, got in zip(plain.parameters(), main.parameters(), strict=True):
        grad = got.grad if got.grad is not None else got.main_grad  # type: ignore[attr-defined]
        assert expected.grad is not None
        torch.testing.assert_close(grad.float(), expected.grad.float(), rtol=2e-2, atol=2e-2)
