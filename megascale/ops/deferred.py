"""Weight gradients put off: what backward leaves for later, and how it is run.

Inside `with deferring(work):` a backward pass computes the gradients of inputs as always, and keeps
in `work` everything that would touch a parameter's gradient: the operands of each weight-gradient
product, small sums (biases, norms, embedding rows) that are only to be added, and the callbacks of
what may begin once the gradients of a unit are complete. `run` does all of it in the order of
backward. A zero-bubble schedule runs it in its weights' half (2401.10241); with several pieces of
work of the same chunk at once, the products of one weight become one GEMM over all their tokens, so
that the fp32 gradient is read and written once (`ops/joined.accumulate_joined`).

Invariant: between `deferring` and `run` no parameter's gradient changes, so that their storage may
be absent, or under way to other ranks.

Where it is looked up: `_open` is a variable of the module, not of a context or a thread. Autograd
runs the backward of CUDA tensors in a thread of its own, where context variables of the caller are
not set; the caller waits for it, so only one piece of work is open at a time. A process that drives
several backward passes at the same time, one a thread, cannot use this; a second `deferring` is
refused.

What it costs: the operands live until `run`: for each linear its input (with recomputation: made
in the input's half and kept) and its output's gradient. An operand that tensor parallelism gathers
is kept as the own rows and gathered in `run`, one transfer ahead of the product that reads it
(`Late`); of several passes at once, gathered operands are copied.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megascale.ops.main_gradient import add_ordinary_gradient

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(grad_y_TO, x_TI) of several micro-batches."""


class Late:
    """An operand that has to be gathered: `start()` begins that and returns how to wait for it.

    The value may be memory that the next but one gather overwrites. One `Late` may be an operand of
    several products.
    """

    def __init__(self, start: Callable[[], Callable[[], Tensor]]) -> None:
        self.start = start


Operand = Tensor | Late


@dataclass(frozen=True)
class _Product:
    weight: Tensor
    grad_y: Operand
    x: Operand


@dataclass
class _Unit:
    """What belongs to one unit of a chunk, and what to call when it has run."""

    products: list[_Product] = field(default_factory=list)
    additions: list[Callable[[], None]] = field(default_factory=list)
    ended: Callable[[], None] | None = None


class DeferredWork:
    """What one backward pass put off, unit by unit.

    keeps_gathered  operands that backward has gathered are copied and kept, not gathered again
    """

    def __init__(self, *, keeps_gathered: bool = False) -> None:
        self.units = [_Unit()]
        self.keeps_gathered = keeps_gathered

    @property
    def num_products(self) -> int:
        return sum(len(unit.products) for unit in self.units)


_open: DeferredWork | None = None


@contextmanager
def deferring(work: DeferredWork) -> Iterator[None]:
    """Backward passes inside leave their weight gradients in `work`."""
    global _open
    assert _open is None, "weight gradients are being deferred already"
    _open = work
    try:
        yield
    finally:
        _open = None


def gathers_later() -> bool:
    """Whether what a deferred product needs gathered is to be a `Late`."""
    return _open is not None and not _open.keeps_gathered


def kept(gathered: Tensor) -> Tensor:
    """A gathered operand, in memory that lasts as long as the product it is for."""
    return gathered if _open is None else gathered.clone()


def defer_product(weight: Tensor, grad_y_TO: Operand, x_TI: Operand) -> bool:
    """Keep a weight-gradient product for later; False where it is to be computed at once."""
    if _open is None or not weight.is_leaf:  # autograd waits for the gradient of what is no leaf
        return False
    _open.units[-1].products.append(_Product(weight, grad_y_TO, x_TI))
    return True


def defer_addition(add: Callable[[], None]) -> bool:
    """Keep for later what adds to a parameter's gradient; False where it is to be done at once."""
    if _open is None:
        return False
    _open.units[-1].additions.append(add)
    return True


def defer_end_of_unit(ended: Callable[[], None]) -> bool:
    """All gradients of a unit have been computed or deferred: call `ended` when they are there."""
    if _open is None:
        return False
    _open.units[-1].ended = ended
    _open.units.append(_Unit())
    return True


@torch.no_grad()
def run(
    works: Sequence[DeferredWork], accumulate: Callable[[Tensor, Pairs], Tensor | None]
) -> None:
    """Do what was put off, unit by unit; each piece of work is of the same chunk, and emptied.

    accumulate  `accumulate(weight, pairs)` adds the sum of `grad_y^T @ x` to the weight's main
                gradient and returns None, or returns it where there is none
    The end of a unit is told once, after the gradients of all pieces.
    """
    assert len({len(work.units) for work in works}) == 1, [len(work.units) for work in works]
    merged = [_joined(units) for units in zip(*(work.units for work in works), strict=True)]
    groups_in_order = [group for groups, _ in merged for group in groups]
    operands = _Operands(
        [product for group in groups_in_order for product in group],
        keep=any(len(group) > 1 for group in groups_in_order),
    )
    for (groups, units), number in zip(merged, range(len(merged)), strict=True):
        for group in groups:
            pairs = [(operands.value(p.grad_y), operands.value(p.x)) for p in group]
            add_ordinary_gradient(group[0].weight, accumulate(group[0].weight, pairs))
        for unit in units:
            for add in unit.additions:
                add()
        for work in works:
            work.units[number] = _Unit()  # lets go of its operands
        ended = units[-1].ended
        if ended is not None:
            ended()


def _joined(units: tuple[_Unit, ...]) -> tuple[list[list[_Product]], tuple[_Unit, ...]]:
    """The products of one unit, those of one weight together, in the order of the first pass."""
    groups: dict[int, list[_Product]] = {}
    for unit in units:
        for product in unit.products:
            groups.setdefault(id(product.weight), []).append(product)
    return list(groups.values()), units


class _Operands:
    """Values of operands: what has to be gathered is begun one gather ahead, and gathered once.

    keep  several gathered values are read at a time: they are copied out of what a later gather
          overwrites
    """

    def __init__(self, products: Sequence[_Product], *, keep: bool) -> None:
        late = [o for p in products for o in (p.grad_y, p.x) if isinstance(o, Late)]
        self._uses = Counter(late)
        self._order = deque(self._uses)
        self._started: deque[tuple[Late, Callable[[], Tensor]]] = deque()
        self._values: dict[Late, Tensor] = {}
        self._keep = keep

    def value(self, operand: Operand) -> Tensor:
        if isinstance(operand, Tensor):
            return operand
        if operand not in self._values:
            self._values[operand] = self._gathered(operand)
        self._uses[operand] -= 1
        value = self._values[operand]
        if self._uses[operand] == 0:
            del self._values[operand]
        return value

    def _gathered(self, operand: Late) -> Tensor:
        if not self._started:
            self._start_next()
        started, wait = self._started.popleft()
        assert started is operand, "operands are read in their order"
        value = wait()
        if self._keep:
            value = value.clone()
        self._start_next()
        return value

    def _start_next(self) -> None:
        if self._order:
            late = self._order.popleft()
            self._started.append((late, late.start()))
