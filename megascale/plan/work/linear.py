"""Linears spread over tensor ranks (MegaScale 3.2; Megatron-LM 1909.08053; 2205.05198).

| | forward | input gradient | needed for the weight gradient |
|---|---|---|---|
| column, sequence parallel | all-gather, GEMM | GEMM, reduce-scatter | all-gather of the input |
| row, sequence parallel | GEMM, reduce-scatter | all-gather, GEMM | what that gathered |
| column, else | GEMM | GEMM, all-reduce | nothing |
| row, else | GEMM, all-reduce | GEMM | nothing |

So it runs in `flux/autograd.py`. A weights' half on its own (`ops/deferred.py`) gathers what it
needs again: a column's input under another weight's GEMM in place of the input gradient's, a row's
gradient once more; where halves are joined, gathered operands are copied and kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.plan.work.operations import (
    Collective,
    Direction,
    Gemm,
    MemoryPass,
    Operation,
    Transfer,
    Work,
)
from megascale.plan.work.shape import RankShape


@dataclass(frozen=True)
class Backward:
    """The two halves of a backward."""

    inputs: Work
    weights: Work


def column_forward(shape: RankShape, name: str, columns: int) -> Work:
    """Hidden states times the own rows of a weight."""
    gemm = Gemm(
        name, shape.tokens, columns, shape.model.hidden_size, Direction.FORWARD, shape.dtype_bytes
    )
    return (*_gather(shape, f"{name}.gather", under=name), gemm)


def row_forward(shape: RankShape, name: str, depth: int) -> Work:
    """The own columns of a weight, summed over tensor ranks."""
    gemm = Gemm(
        name, shape.tokens, shape.model.hidden_size, depth, Direction.FORWARD, shape.dtype_bytes
    )
    return (gemm, *_reduce(shape, f"{name}.reduce", under=name))


def pair_forward(shape: RankShape, first: tuple[str, int], second: tuple[str, int]) -> Work:
    """Two rows' products in one sum, and one transfer: the way out of a parallel block."""
    name, depth = second
    if shape.one_pair:
        return row_forward(shape, name, first[1] + depth)
    alone = Gemm(
        first[0],
        shape.tokens,
        shape.model.hidden_size,
        first[1],
        Direction.FORWARD,
        shape.dtype_bytes,
    )
    gemm, *reduce = row_forward(shape, name, depth)
    # the second product is accumulated: it reads what the first wrote
    return (alone, gemm, MemoryPass("add", shape.hidden_bytes, kernels=0), *reduce)


def column_backward(shape: RankShape, name: str, columns: int, *, bias: bool) -> Backward:
    """Of `column_forward`. `bias`: its gradient is a sum over rows of its own."""
    hidden, size = shape.model.hidden_size, shape.dtype_bytes
    dgrad, wgrad = f"{name}.dgrad", f"{name}.wgrad"
    gemm = Gemm(dgrad, shape.tokens, hidden, columns, Direction.DGRAD, size)
    reduce = _reduce(shape, f"{name}.dgrad.reduce", under=dgrad, beside=wgrad)
    beside = wgrad if shape.halves == "split" else dgrad
    gather = _gather(shape, f"{name}.wgrad.gather", beside=beside)
    weights: tuple[Operation, ...] = (_wgrad(shape, wgrad, columns, hidden),)
    if bias:
        weights += (_column_sum(shape.column_bytes(columns)),)
    if shape.halves == "split":
        return Backward((gemm, *reduce), (*gather, *weights))
    kept = _kept(shape) if gather else ()
    return Backward((*gather, gemm, *reduce, *kept), weights)


def row_backward(shape: RankShape, terms: tuple[tuple[str, int], ...], *, bias: bool) -> Backward:
    """Of `row_forward` or `pair_forward`: one gather of the gradient for all (name, depth)."""
    hidden, size = shape.model.hidden_size, shape.dtype_bytes
    if len(terms) > 1 and shape.one_pair:
        products = [(terms[-1][0], sum(depth for _, depth in terms))]
    else:
        products = list(terms)
    first = f"{products[0][0]}.dgrad"
    gather = _gather(shape, f"{first}.gather", under=first)
    gemms = tuple(
        Gemm(f"{name}.dgrad", shape.tokens, depth, hidden, Direction.DGRAD, size)
        for name, depth in products
    )
    wgrads = tuple(_wgrad(shape, f"{name}.wgrad", hidden, depth) for name, depth in terms)
    weights: tuple[Operation, ...] = wgrads
    if bias:
        weights += (_column_sum(shape.own_hidden_bytes),)
    if shape.halves == "split":  # gathered once more
        again = _gather(shape, f"{terms[0][0]}.wgrad.gather", beside=wgrads[0].name)
        return Backward((*gather, *gemms), (*again, *weights))
    kept = _kept(shape) if gather else ()
    return Backward((*gather, *gemms, *kept), weights)


def _wgrad(shape: RankShape, name: str, rows: int, columns: int) -> Gemm:
    """Over the tokens of all joined micro-batches; `pricing` takes its share of one."""
    depth = shape.joined * shape.tokens
    return Gemm(name, rows, columns, depth, Direction.WGRAD, shape.dtype_bytes)


def _kept(shape: RankShape) -> Work:
    """A gathered operand that a joined weight gradient reads much later is copied."""
    if shape.halves != "joined":
        return ()
    return (MemoryPass("copy", 2 * shape.hidden_bytes),)


def _column_sum(num_bytes: float) -> MemoryPass:
    return MemoryPass("column_sum", num_bytes, kernels=2)


def _gather(
    shape: RankShape, name: str, *, under: str | None = None, beside: str | None = None
) -> tuple[Collective, ...]:
    if shape.tensor == 1 or not shape.sequence_parallel:
        return ()
    return (Collective(name, Transfer.ALL_GATHER, shape.hidden_bytes, "tensor", under, beside),)


def _reduce(
    shape: RankShape, name: str, *, under: str | None = None, beside: str | None = None
) -> tuple[Collective, ...]:
    if shape.tensor == 1:
        return ()
    kind = Transfer.REDUCE_SCATTER if shape.sequence_parallel else Transfer.ALL_REDUCE
    return (Collective(name, kind, shape.hidden_bytes, "tensor", under, beside),)
