"""Embedding, head, loss: by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megascale.config import ModelConfig
from megascale.plan.case import Case, Job, Layout, Software
from megascale.plan.work.ends import (
    embedding_work,
    final_norm_work,
    head_work,
    shared_head_work,
    vocabulary_rows,
)
from megascale.plan.work.operations import Collective, Gemm, MemoryPass, Transfer, Work

MODEL = ModelConfig(
    hidden_size=512, num_layers=4, num_heads=8, vocab_size=1000, norm="layernorm",
    activation="gelu_tanh", position="learned", bias="all",
)  # fmt: skip
TOKENS, OWN = 2 * 128, 128


OURS = Software()


def case(software: Software = OURS, **layout: Any) -> Case:
    sizes: dict[str, Any] = {"tensor": 2, "micro_batch_size": 2, **layout}
    return Case(Job(MODEL, 8, 128), Layout(**sizes), software)


def passes(work: Work) -> float:
    return sum(op.num_bytes for op in work if isinstance(op, MemoryPass))


def test_parts_of_the_vocabulary_are_padded_as_the_trainer_does() -> None:
    from megascale.parallel.tensor import padded_vocab_rows

    for vocab in (1000, 1024, 50257, 64000):
        for parts in (1, 2, 6, 8):
            assert vocabulary_rows(vocab, parts) == padded_vocab_rows(vocab, parts)


def test_lookup_of_a_split_table() -> None:
    """Rows read and written, zeroed where they are others', summed; positions 2 and their sum 3."""
    whole, own = TOKENS * 512 * 2, OWN * 512 * 2
    work = embedding_work(case())
    assert passes(work.forward) == 4 * whole + 5 * own
    collectives = [op for op in work.forward if isinstance(op, Collective)]
    assert collectives == [Collective("embedding.reduce", Transfer.REDUCE_SCATTER, whole, "tensor")]
    gathers = [op.transfer for op in work.backward_input if isinstance(op, Collective)]
    assert gathers == [Transfer.ALL_GATHER]
    alone = embedding_work(case(tensor=1))
    assert passes(alone.forward) == 2 * whole + 5 * whole
    assert not [op for op in alone.forward if isinstance(op, Collective)]


def test_the_head_and_its_loss() -> None:
    """512 rows of the vocabulary on each rank. Fused: logits read, then read and written."""
    work = head_work(case())
    gemms = [op for op in work.forward if isinstance(op, Gemm)]
    assert [(op.rows, op.columns, op.depth) for op in gemms] == [(TOKENS, 512, 512)]
    logits = {op.name: op.num_bytes for op in work.forward if isinstance(op, MemoryPass)}
    assert logits == {"norm": 4 * OWN * 512 * 2, "cross_entropy": TOKENS * 512 * 2}
    sums = [op for op in work.forward if isinstance(op, Collective) and "loss" in op.name]
    assert [op.num_bytes for op in sums] == [4 * TOKENS, 8 * TOKENS]
    back = {op.name: op.num_bytes for op in work.backward_input if isinstance(op, MemoryPass)}
    assert back["cross_entropy_backward"] == 2 * TOKENS * 512 * 2


def test_plain_cross_entropy_goes_over_fp32_copies() -> None:
    plain = head_work(case(Software(operators="plain")))
    loss = next(op for op in plain.forward if op.name == "cross_entropy")
    assert isinstance(loss, MemoryPass)
    assert loss.num_bytes == TOKENS * 512 * (2 + 7 * 4)


def test_a_shared_head_splits_its_rows_over_stages() -> None:
    """Over 2 tensor ranks and 2 stages 256 rows each; hidden states come and their gradients go."""
    shared = case(pipeline=2, virtual=2, schedule="interleaved_1f1b", share_head=True)
    work = shared_head_work(shared)
    gemm = next(op for op in work.forward if isinstance(op, Gemm))
    assert gemm.columns == 256
    moved = {
        op.name: op.num_bytes
        for part in (work.forward, work.backward_input)
        for op in part
        if isinstance(op, Collective) and op.axis == "pipeline"
    }
    assert moved == {"head.broadcast": OWN * 512, "head.sum": OWN * 512}
    joined = replace(shared.layout, join_weight_gradients=4)
    weight = shared_head_work(replace(shared, layout=joined)).backward_weight
    assert [op.depth for op in weight if isinstance(op, Gemm)] == [4 * TOKENS]
    assert {op.name for op in final_norm_work(shared).forward} == {"norm"}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_all_parts_together_multiply_by_the_padded_vocabulary(parts: int) -> None:
    work = head_work(case(tensor=parts))
    flops = sum(op.flops for op in work.forward if isinstance(op, Gemm))
    assert parts * flops == 2 * TOKENS * 512 * 1024
