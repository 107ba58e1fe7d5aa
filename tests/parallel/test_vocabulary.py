"""The sharded lookup against one table, with ranks that hold no real row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megascale.parallel.tensor import TensorParallel, padded_vocab_rows
from megascale.parallel.vocabulary import vocabulary_embedding
from tests.distributed import run_ranks

VOCAB, HIDDEN, TOKENS = 100, 6, 24  # of 4 ranks with 64 rows each, two hold padding alone
FLOATS = NDArray[np.float64]


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Table, tokens with repetitions (first and last row among them), gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    table_VD = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, generator=generator)
    tokens_T = torch.randint(VOCAB, (TOKENS,), generator=generator)
    tokens_T[:6] = torch.tensor([0, 99, 99, 63, 64, 64])
    return table_VD, tokens_T, torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator)


def _shard(table_VD: Tensor, tp: TensorParallel) -> Tensor:
    rows = padded_vocab_rows(VOCAB, tp.size)
    padded = F.pad(table_VD, (0, 0, 0, rows * tp.size - VOCAB))
    return padded[tp.rank * rows : (tp.rank + 1) * rows].clone()


def _look_up(tp: TensorParallel) -> list[tuple[FLOATS, FLOATS]]:
    """Output rows and the table's gradient after two passes, without and with a main gradient."""
    table_VD, tokens_T, grad_TD = _inputs()
    grad_tD = grad_TD.chunk(tp.size)[tp.rank]
    found = []
    for into_main_grad in (False, True):
        weight_vD = _shard(table_VD, tp).requires_grad_()
        if into_main_grad:
            weight_vD.main_grad = torch.zeros_like(weight_vD)  # type: ignore[attr-defined]
        for _ in range(2):
            x_tD = vocabulary_embedding(tp)(tokens_T, weight_vD)
            x_tD.backward(grad_tD)
        gradient = weight_vD.main_grad if into_main_grad else weight_vD.grad  # type: ignore[attr-defined]
        assert gradient is not None
        assert (weight_vD.grad is None) is into_main_grad
        found.append((x_tD.detach().numpy(), gradient.numpy()))
    return found


def _run(rank: int, world_size: int) -> list[tuple[FLOATS, FLOATS]]:
    return _look_up(TensorParallel(dist.group.WORLD, rank, world_size))


def _check(by_rank: list[list[tuple[FLOATS, FLOATS]]]) -> None:
    table_VD, tokens_T, grad_TD = _inputs()
    table_VD.requires_grad_()
    expected_TD = F.embedding(tokens_T, table_VD)
    expected_TD.backward(2.0 * grad_TD)
    assert table_VD.grad is not None
    for way in zip(*by_rank, strict=True):
        x_TD, grad_VD = (np.concatenate(parts) for parts in zip(*way, strict=True))
        np.testing.assert_array_equal(x_TD, expected_TD.detach().numpy())
        np.testing.assert_allclose(grad_VD[:VOCAB], table_VD.grad.numpy(), rtol=0, atol=1e-14)
        assert (grad_VD[VOCAB:] == 0.0).all()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_lookup_equals_one_table(num_ranks: int) -> None:
    _check(run_ranks(_run, num_ranks))


def test_one_rank_needs_no_group() -> None:
    _check([_look_up(TensorParallel(None, 0, 1))])


def test_the_gradient_of_another_rank_s_token_adds_nothing_even_where_it_is_infinite() -> None:
    """Row 70 belongs to rank 1 of 2; rank 0 must not turn 0 x inf into NaN in a row of its own."""
    tp = TensorParallel(None, 0, 2)  # no group: what rank 0 alone does
    weight_vD = torch.randn(64, HIDDEN).requires_grad_()
    grad_TD = torch.stack([torch.ones(HIDDEN), torch.full((HIDDEN,), torch.inf)])
    x_TD = vocabulary_embedding(tp)(torch.tensor([3, 70]), weight_vD)
    assert (x_TD[1] == 0.0).all()
    x_TD.backward(grad_TD)
    assert (grad_TD[1] == torch.inf).all()  # the incoming gradient is not ours to write
    assert weight_vD.grad is not None
    expected = torch.zeros(64, HIDDEN)
    expected[3] = 1.0
    assert torch.equal(weight_vD.grad, expected)
