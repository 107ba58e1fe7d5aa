"""A model on packed documents equals the model on each document alone: logits and gradients.

Rotary positions run on through the sequence and learned ones start with the document, so both
families are here, with every switch that touches attention.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megascale.config import ModelConfig
from megascale.model.context import make_context
from megascale.model.transformer import TransformerChunk
from megascale.ops.cross_entropy import cross_entropy
from megascale.ops.documents import Documents
from tests.model.builders import build, random_tokens, tiny
from tests.ops.test_documents import packed, spans

LENGTHS = ((7, 1, 16), (24,), (3, 20, 1))
SEQ_LEN = 24
# relative and absolute, of logits and gradients
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}
VARIANTS: dict[str, dict[str, Any]] = {
    "learned": {"preset": "tiny-gpt"},
    "learned-parallel": {"preset": "tiny-gpt", "block": "parallel"},
    "rope": {"preset": "tiny-llama"},
    "rope-parallel": {"preset": "tiny-llama", "block": "parallel"},
    "rope-scaled": {
        "preset": "tiny-llama",
        "rope_scaling": {"factor": 4.0, "original_max_seq_len": 16},
    },
    "window": {"preset": "tiny-mistral", "attention_window": 5},
    "window-learned-parallel": {"preset": "tiny-gpt", "block": "parallel", "attention_window": 5},
    "qk-norm": {"preset": "tiny-qwen3"},
}


def _loss(model: TransformerChunk, tokens: Tensor, documents: Documents | None) -> Tensor:
    """Of the next token inside each document; the last has none."""
    ctx = make_context(*tokens.shape, documents=documents)
    mask = torch.ones(tokens.shape, dtype=torch.float64)
    if documents is None:
        mask[:, -1] = 0.0
    else:
        mask.view(-1)[documents.bounds_N[1:] - 1] = 0.0
    logits = model(tokens.flatten(), ctx)
    return cross_entropy(logits, tokens.roll(-1, dims=1).flatten(), mask.flatten())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_equal_each_alone(name: str, dtype: torch.dtype) -> None:
    cfg = tiny(**VARIANTS[name])
    model, tokens = build(cfg, dtype=dtype), random_tokens(cfg, len(LENGTHS), SEQ_LEN)
    documents = packed(LENGTHS)
    close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    parameters = list(model.parameters())

    logits = model(tokens.flatten(), make_context(len(LENGTHS), SEQ_LEN, documents=documents))
    logits = logits.view(len(LENGTHS), SEQ_LEN, -1)
    total: list[Tensor] = [torch.zeros_like(parameter) for parameter in parameters]
    for b, span in spans(LENGTHS):
        document = tokens[b : b + 1, span]
        alone = model(document.flatten(), make_context(*document.shape))
        close(logits[b, span], alone)
        loss = _loss(model, document, None)
        for sum_, grad in zip(total, torch.autograd.grad(loss, parameters), strict=True):
            sum_ += grad
    got = torch.autograd.grad(_loss(model, tokens, documents), parameters)
    for grad, expected in zip(got, total, strict=True):
        close(grad, expected)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", ["learned", "rope-parallel", "window"])
def test_recomputation_sees_the_same_documents(name: str, dropout: float, recompute: Any) -> None:
    cfg = tiny(**VARIANTS[name], attention_dropout=dropout)
    plain, again = (_gradients(cfg, mode) for mode in ("none", recompute))
    for got, expected in zip(again, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def _gradients(cfg: ModelConfig, recompute: Any) -> tuple[Tensor, ...]:
    model, tokens = build(cfg), random_tokens(cfg, len(LENGTHS), SEQ_LEN)
    ctx = make_context(
        len(LENGTHS),
        SEQ_LEN,
        documents=packed(LENGTHS),
        sample_numbers_B=torch.arange(len(LENGTHS)),
        dropout_seed=3,
        recompute=recompute,
    )
    logits = model(tokens.flatten(), ctx)
    return torch.autograd.grad(logits.square().sum(), list(model.parameters()))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("name", VARIANTS)
def test_other_documents_change_nothing(name: str, dropout: float) -> None:
    cfg = tiny(**VARIANTS[name], attention_dropout=dropout)
    model, tokens = build(cfg), random_tokens(cfg, len(LENGTHS), SEQ_LEN)
    ctx = make_context(
        len(LENGTHS),
        SEQ_LEN,
        documents=packed(LENGTHS),
        sample_numbers_B=torch.arange(len(LENGTHS)),
        dropout_seed=3,
    )
    changed = tokens.clone()
    changed[0, :7] = (tokens[0, :7] + 1) % cfg.vocab
    with torch.no_grad():
        before, after = (model(x.flatten(), ctx).view(*x.shape, -1) for x in (tokens, changed))
    torch.testing.assert_close(before[0, 7:], after[0, 7:], rtol=0, atol=0)
    torch.testing.assert_close(before[1:], after[1:], rtol=0, atol=0)
    assert (before[0, :7] - after[0, :7]).abs().max() > 1e-3
