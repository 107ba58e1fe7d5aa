"""The operators as torch custom ops, for `torch.compile`: graphs name them and know their shapes.

A graph can hold tensors and plain values, not Python objects. So an operator is registered under a
string (its op, group and settings), the custom op takes the string, and its real implementation
calls the operator. Only compiled code goes this way; an eager call would pay for the dispatch.

A graph promises that results are new memory and stay what they are. Therefore the gathered input,
which eagerly may be a view of a slot, is a copy here.

Legend: T rows of all ranks (m), t rows of this rank, K reduction, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from megascale.errors import FluxError

# By key, those of equal settings in the order of their making. Weak: whoever calls an operator has
# it, and one that is held here would hold its group until the interpreter ends, when gloo's threads
# may no longer let go of Python's tensors (they abort the process).
_operators: dict[str, list[ref[Any]]] = {}


def register(key: str, operator: Any) -> None:
    """Make `operator` what graphs mean by `key`, as long as it is there."""
    living = [known for known in _operators.get(key, ()) if known() is not None]
    _operators[key] = [*living, ref(operator)]


def _operator(key: str) -> Any:
    """The newest one."""
    living = (operator for known in reversed(_operators.get(key, ())) if (operator := known()))
    operator = next(living, None)
    if operator is None:
        raise FluxError(
            f"a compiled graph calls the flux operator {key!r}, which this process has not made or "
            "has let go; make the operator before the graph runs, and keep it"
        )
    return operator


@torch.library.custom_op("megascale::all_gather_gemm", mutates_args=())
def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    key: str,
    layout: str,
    num_rows: int | None,
    gathered: bool,
) -> list[Tensor]:
    """y_TN of each weight, then x_TK where `gathered`."""
    outputs, x_TK = _operator(key).run(x_tK, weights, biases, layout, num_rows, gathered)
    return [*outputs, x_TK.clone()] if gathered else list(outputs)


@all_gather_gemm.register_fake
def _(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],  # noqa: ARG001 - as in the real one
    key: str,
    layout: str,
    num_rows: int | None,
    gathered: bool,
) -> list[Tensor]:
    m = x_tK.shape[0] * _operator(key).world_size if num_rows is None else num_rows
    outputs = [x_tK.new_empty(m, _columns(weight, layout)) for weight in weights]
    return [*outputs, x_tK.new_empty(m, x_tK.shape[1])] if gathered else outputs


@torch.library.custom_op("megascale::gemm_reduce_scatter", mutates_args=())
def gemm_reduce_scatter(
    x_TK: Tensor, weight: Tensor, bias: Tensor | None, key: str, layout: str
) -> Tensor:
    """y_tN."""
    y_tN: Tensor = _operator(key).run(x_TK, [weight], [bias], layout)
    return y_tN


@gemm_reduce_scatter.register_fake
def _(x_TK: Tensor, weight: Tensor, bias: Tensor | None, key: str, layout: str) -> Tensor:  # noqa: ARG001
    return _own_rows(x_TK, weight, key, layout)


@torch.library.custom_op("megascale::gemm_reduce_scatter_pair", mutates_args=())
def gemm_reduce_scatter_pair(
    a_TK: Tensor,
    weight_a: Tensor,
    b_TJ: Tensor,
    weight_b: Tensor,
    bias: Tensor | None,
    key: str,
    layout: str,
) -> Tensor:
    """y_tN of two products."""
    operator = _operator(key)
    with torch.no_grad():
        y_tN: Tensor = operator.pair(a_TK, weight_a, b_TJ, weight_b, bias, weight_layout=layout)
    return y_tN


@gemm_reduce_scatter_pair.register_fake
def _(
    a_TK: Tensor,
    weight_a: Tensor,
    b_TJ: Tensor,  # noqa: ARG001 - as in the real one
    weight_b: Tensor,  # noqa: ARG001
    bias: Tensor | None,  # noqa: ARG001
    key: str,
    layout: str,
) -> Tensor:
    return _own_rows(a_TK, weight_a, key, layout)


@torch.library.custom_op("megascale::gemm_all_reduce", mutates_args=())
def gemm_all_reduce(
    x_TK: Tensor, weight: Tensor, bias: Tensor | None, key: str, layout: str
) -> Tensor:
    """y_TN."""
    y_TN: Tensor = _operator(key).run(x_TK, [weight], [bias], layout)
    return y_TN


@gemm_all_reduce.register_fake
def _(x_TK: Tensor, weight: Tensor, bias: Tensor | None, key: str, layout: str) -> Tensor:  # noqa: ARG001
    return x_TK.new_empty(x_TK.shape[0], _columns(weight, layout))


@torch.library.custom_op("megascale::all_gather", mutates_args=())
def all_gather(x_tK: Tensor, key: str, num_rows: int | None) -> Tensor:
    """x_TK, by the transport of the all-gather + GEMM operator `key`."""
    with torch.no_grad():
        x_TK: Tensor = _operator(key).start_all_gather(x_tK, num_rows)()
    return x_TK.clone()


@all_gather.register_fake
def _(x_tK: Tensor, key: str, num_rows: int | None) -> Tensor:
    m = x_tK.shape[0] * _operator(key).world_size if num_rows is None else num_rows
    return x_tK.new_empty(m, x_tK.shape[1])


def _own_rows(x_TK: Tensor, weight: Tensor, key: str, layout: str) -> Tensor:
    operator = _operator(key)
    m = x_TK.shape[0]
    c = (m + operator.world_size - 1) // operator.world_size
    first = torch.sym_min(operator.rank * c, m)  # m may be symbolic
    end = torch.sym_min((operator.rank + 1) * c, m)
    return x_TK.new_empty(end - first, _columns(weight, layout))


def _columns(weight: Tensor, layout: str) -> int:
    return weight.shape[0 if layout == "NK" else 1]
