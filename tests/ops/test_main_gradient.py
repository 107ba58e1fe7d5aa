"""The first contribution to a stale main gradient overwrites it, whoever makes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megascale.ops.deferred import DeferredWork, deferring, run
from megascale.ops.embedding import accumulate_embedding_gradient, embedding
from megascale.ops.joined import accumulate_joined
from megascale.ops.linear import accumulate_weight_gradient, linear
from megascale.ops.main_gradient import add_to_main_gradient, mark_stale, take_stale

ROWS = torch.tensor([0, 3, 3])


def _product(weight: Tensor, step: int) -> None:
    accumulate_weight_gradient(weight, *_operands(step))


def _rows(weight: Tensor, step: int) -> None:
    accumulate_embedding_gradient(weight, ROWS, _operands(step)[1][:3])


def _whole(weight: Tensor, step: int) -> None:
    add_to_main_gradient(weight, torch.full(weight.shape, float(step)))


def _operands(step: int) -> tuple[Tensor, Tensor]:
    """grad_y [5, 4] and x [5, 3] of small integers: sums are exact."""
    generator = torch.Generator().manual_seed(step)
    grad, x = (torch.randint(-3, 4, (5, n), generator=generator) for n in (4, 3))
    return grad.bfloat16(), x.bfloat16()


@pytest.mark.parametrize("first", [_product, _rows, _whole])
@pytest.mark.parametrize("second", [_product, _rows, _whole])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_overwrites_and_the_second_adds(
    first: Callable[[Tensor, int], None],
    second: Callable[[Tensor, int], None],
    dtype: torch.dtype,
) -> None:
    found = []
    for stale in (True, False):
        weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
        before = torch.nan if stale else 0.0  # what is overwritten is not read either
        weight.main_grad = torch.full((4, 3), before, dtype=dtype)  # type: ignore[attr-defined]
        if stale:
            mark_stale(weight)
        first(weight, 1)
        second(weight, 2)
        assert not take_stale(weight)
        found.append(weight.main_grad)  # type: ignore[attr-defined]
    assert found[1].any()
    assert torch.equal(*found)


@pytest.mark.parametrize("defer", [False, True])
def test_a_tied_table_gets_the_sum_of_both_uses(defer: bool) -> None:
    """The head's product comes first in backward and overwrites, the embedding's rows are added;
    so in two micro-batches, and where both are deferred and joined."""
    table = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    table.main_grad = torch.full((4, 3), torch.nan)  # type: ignore[attr-defined]
    mark_stale(table)
    works = []
    for _ in range(2):
        loss = (linear(embedding(ROWS, table), table) ** 2).sum()
        works.append(DeferredWork())
        if defer:
            with deferring(works[-1]):
                loss.backward()
        else:
            loss.backward()
    if defer:
        assert take_stale(table), "nothing has been written yet"
        mark_stale(table)
        run(works, accumulate_joined)
    reference = table.detach().clone().requires_grad_()
    (2 * (reference[ROWS] @ reference.t()).pow(2).sum()).backward()
    got: Tensor = table.main_grad  # type: ignore[attr-defined]
    assert reference.grad is not None
    torch.testing.assert_close(got, reference.grad)
