"""Deferred weight gradients: what is kept, in which order it runs, and joined products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megascale.ops.deferred import (
    DeferredWork,
    Late,
    defer_product,
    deferring,
    gathers_later,
    kept,
    run,
)
from megascale.ops.embedding import embedding
from megascale.ops.joined import accumulate_joined
from megascale.ops.linear import linear
from megascale.ops.main_gradient import mark_stale

F64 = torch.float64
T, IN, OUT = 5, 3, 4


def _leaf(*shape: int, main: bool = True) -> Tensor:
    leaf = torch.randn(shape, dtype=F64).requires_grad_()
    if main:
        leaf.main_grad = torch.zeros(shape, dtype=F64)  # type: ignore[attr-defined]
    return leaf


def _main(leaf: Tensor) -> Tensor:
    gradient: Tensor = leaf.main_grad  # type: ignore[attr-defined]
    return gradient


def test_nothing_is_added_before_it_runs() -> None:
    weight, bias, table = _leaf(OUT, IN), _leaf(OUT), _leaf(7, IN)
    tokens = torch.tensor([1, 6, 1, 0, 2])
    y = linear(embedding(tokens, table), weight, bias)
    work = DeferredWork()
    with deferring(work):
        y.square().sum().backward()
    assert all(not _main(leaf).any() and leaf.grad is None for leaf in (weight, bias, table))
    run([work], accumulate_joined)
    plain = [leaf.detach().clone().requires_grad_() for leaf in (weight, bias, table)]
    torch.nn.functional.linear(plain[2][tokens], plain[0], plain[1]).square().sum().backward()
    for leaf, reference in zip((weight, bias, table), plain, strict=True):
        torch.testing.assert_close(_main(leaf), reference.grad, rtol=1e-12, atol=1e-12)
        assert leaf.grad is None
    assert work.num_products == 0, "what has run is let go of"


@pytest.mark.parametrize("main", [True, False])
def test_several_passes_are_joined_in_one_product_a_weight(main: bool) -> None:
    weight = _leaf(OUT, IN, main=main)
    works, expected = [], torch.zeros(OUT, IN, dtype=F64)
    for _ in range(3):
        x, grad = torch.randn(T, IN, dtype=F64), torch.randn(T, OUT, dtype=F64)
        expected += grad.t() @ x
        works.append(DeferredWork())
        with deferring(works[-1]):
            linear(x, weight).backward(grad)
    calls = []

    def accumulate(weight: Tensor, pairs: object) -> Tensor | None:
        calls.append(len(pairs))  # type: ignore[arg-type]
        return accumulate_joined(weight, pairs)  # type: ignore[arg-type]

    run(works, accumulate)
    assert calls == [3]
    found = _main(weight) if main else weight.grad
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_an_earlier_step_left_is_overwritten_when_the_work_runs() -> None:
    weight = _leaf(OUT, IN)
    _main(weight).fill_(torch.nan)
    mark_stale(weight)
    x, grad = torch.randn(T, IN, dtype=F64), torch.randn(T, OUT, dtype=F64)
    works = [DeferredWork(), DeferredWork()]
    for work in works:
        with deferring(work):
            linear(x, weight).backward(grad)
    assert _main(weight).isnan().all()
    run(works, accumulate_joined)
    torch.testing.assert_close(_main(weight), 2 * grad.t() @ x, rtol=1e-12, atol=1e-12)


class _Arena:
    """Two slots in turn: a gathered value is overwritten by the next call but one."""

    def __init__(self) -> None:
        self.slots = [torch.zeros(T, OUT, dtype=F64) for _ in range(2)]
        self.calls = 0
        self.log: list[str] = []

    def late(self, value: Tensor, name: str) -> Late:
        def start() -> Callable[[], Tensor]:
            slot = self.slots[self.calls % 2]
            self.calls += 1
            slot.copy_(value)
            self.log.append(f"start {name}")
            return lambda: slot

        return Late(start)


@pytest.mark.parametrize("num_works", [1, 3])
def test_gathers_run_one_ahead_and_are_read_before_they_are_overwritten(num_works: int) -> None:
    """Each gathered gradient feeds two weights, as in a parallel block."""
    arena, works = _Arena(), []
    weights = [[_leaf(OUT, IN), _leaf(OUT, IN)] for _ in range(4)]
    expected = [[torch.zeros(OUT, IN, dtype=F64) for _ in pair] for pair in weights]
    for number in range(num_works):
        works.append(DeferredWork())
        with deferring(works[-1]):
            for unit, pair in enumerate(weights):
                grad = torch.randn(T, OUT, dtype=F64)
                late = arena.late(grad, f"{unit}.{number}")
                for weight, total in zip(pair, expected[unit], strict=True):
                    x = torch.randn(T, IN, dtype=F64)
                    total += grad.t() @ x
                    assert defer_product(weight, late, x)

    def accumulate(weight: Tensor, pairs: object) -> Tensor | None:
        arena.log.append("multiply")
        return accumulate_joined(weight, pairs)  # type: ignore[arg-type]

    assert arena.calls == 0
    run(works, accumulate)
    assert arena.calls == 4 * num_works, "each is gathered once"
    for pair, totals in zip(weights, expected, strict=True):
        for weight, total in zip(pair, totals, strict=True):
            torch.testing.assert_close(_main(weight), total, rtol=1e-12, atol=1e-12)
    if num_works == 1:
        assert arena.log[:4] == ["start 0.0", "start 1.0", "multiply", "multiply"]


def test_a_weight_that_is_computed_gets_its_gradient_at_once() -> None:
    leaf = torch.randn(OUT, IN, dtype=F64, requires_grad=True)
    work = DeferredWork()
    with deferring(work):
        linear(torch.ones(T, IN, dtype=F64), 2 * leaf).sum().backward()
    assert work.num_products == 0
    torch.testing.assert_close(leaf.grad, torch.full((OUT, IN), 2.0 * T, dtype=F64))


def test_one_piece_of_work_at_a_time_also_after_an_error() -> None:
    nested = deferring(DeferredWork())
    with deferring(DeferredWork()), pytest.raises(AssertionError, match="deferred already"), nested:
        pass
    assert not gathers_later(), "nothing is deferred any more"
    with pytest.raises(ZeroDivisionError), deferring(DeferredWork()):
        raise ZeroDivisionError
    assert not gathers_later(), "nothing is deferred any more"


def test_a_gathered_operand_is_gathered_again_or_copied_as_the_work_says() -> None:
    gathered = torch.ones(2)
    assert kept(gathered) is gathered
    assert not gathers_later()
    with deferring(DeferredWork()):
        assert gathers_later()
    with deferring(DeferredWork(keeps_gathered=True)):
        assert not gathers_later()
        copy = kept(gathered)
    gathered.zero_()  # the next call but one
    assert copy.tolist() == [1, 1]
