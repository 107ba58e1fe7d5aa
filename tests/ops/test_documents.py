"""Attention inside documents: each document's part of a sequence as if it stood alone."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from megascale.ops.attention import AttentionDropout, attention, attention_reference
from megascale.ops.documents import Documents, make_documents
from megascale.ops.random import bits, keep_mask

# relative and absolute, of results and gradients
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
LENGTHS = ((5, 1, 6), (12,), (1, 1, 10))  # of the documents of each sequence
SEQ_LEN, HEADS, HEAD_DIM = 12, 4, 8


def packed(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> Documents:
    starts = [[sum(row[:n]) for n, size in enumerate(row) for _ in range(size)] for row in lengths]
    return make_documents(torch.tensor(starts, dtype=torch.int32))


def spans(lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> list[tuple[int, slice]]:
    """(sequence, positions) of each document."""
    return [
        (b, slice(sum(row[:n]), sum(row[: n + 1])))
        for b, row in enumerate(lengths)
        for n in range(len(row))
    ]


def _qkv(kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(len(LENGTHS), SEQ_LEN, heads, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def test_documents_are_counted_on_the_host() -> None:
    documents = packed()
    assert documents.bounds_N.tolist() == [0, 5, 6, 12, 24, 25, 26, 36]
    assert documents.bounds_N.dtype == documents.starts_BS.dtype == torch.int32
    assert documents.longest == 12
    assert documents.starts_BS[0].tolist() == [0, 0, 0, 0, 0, 5, 6, 6, 6, 6, 6, 6]
    assert packed(((2, 3), (4, 1))).longest == 4
    with pytest.raises(AssertionError, match="begins with a document"):
        make_documents(torch.tensor([[1, 1, 2]]))


def test_a_mask_shows_what_is_seen() -> None:
    mask = packed(((2, 3),)).visible(None)
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert packed(((2, 3),)).visible(2)[0, 0, 4].int().tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_documents_equal_each_alone(
    kv_heads: int, window: int | None, dtype: torch.dtype
) -> None:
    inputs = _qkv(kv_heads, dtype)
    weights = torch.randn(len(LENGTHS), SEQ_LEN, HEADS, HEAD_DIM, dtype=torch.float64)
    close = partial(torch.testing.assert_close, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    alone = torch.zeros(inputs[0].shape, dtype=torch.float64)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for b, span in spans():
        alone[b, span] = attention(*(x[b : b + 1, span] for x in wide), window=window)[0]
    expected = torch.autograd.grad(alone, wide, weights)
    for function in (attention, attention_reference):
        y = function(*inputs, window=window, documents=packed())
        close(y.double(), alone)
        for got, wanted in zip(
            torch.autograd.grad(y, inputs, weights.to(dtype)), expected, strict=True
        ):
            close(got.double(), wanted)


@pytest.mark.parametrize("window", [None, 3])
def test_dropout_inside_documents_is_the_formula(window: int | None) -> None:
    q, k, v = _qkv(HEADS)
    documents = packed()
    rows = torch.arange(len(LENGTHS) * HEADS * SEQ_LEN).view(-1, HEADS, SEQ_LEN) * 17
    y = attention(
        q, k, v, window=window, documents=documents, dropout=AttentionDropout(0.5, 11, rows)
    )
    keep = keep_mask(bits(11, rows), SEQ_LEN, 0.5)
    scores = torch.einsum("bskh,bzkh->bksz", q, k) / math.sqrt(HEAD_DIM)
    seen = torch.zeros(len(LENGTHS), 1, SEQ_LEN, SEQ_LEN, dtype=torch.bool)
    for b, span in spans():
        for s in range(span.start, span.stop):
            first = span.start if window is None else max(span.start, s + 1 - window)
            seen[b, 0, s, first : s + 1] = True
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1) * keep / 0.5
    torch.testing.assert_close(y, torch.einsum("bksz,bzkh->bskh", weights, v))


def test_one_document_a_sequence_is_causal_attention() -> None:
    q, k, v = _qkv(2)
    whole = packed(((SEQ_LEN,),) * len(LENGTHS))
    assert whole.are_sequences
    assert not packed().are_sequences
    expected = attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v, documents=whole), expected, rtol=0, atol=0)
    torch.testing.assert_close(attention_reference(q, k, v, documents=whole), expected)
