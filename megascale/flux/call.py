"""One call of an operator, and the form that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.problem import Op


@dataclass
class Call:
    """The arguments of one call, as `problem.check` describes them.

    pair  a second (x, weight) of gemm_rs, whose product is added (`gemm_reduce_scatter/pair.py`)
    """

    op: Op
    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    layout: str
    num_rows: int | None = None
    gathered: bool = False
    pair: tuple[Tensor, Tensor] | None = None

    @property
    def second(self) -> Call:
        """The call of the pair alone."""
        assert self.pair is not None
        x, weight = self.pair
        return Call(self.op, x, [weight], [None], self.layout)


def check_tensors(call: Call) -> None:
    """FluxError where an argument is no tensor."""
    given: list[Any] = [call.x, *call.weights, *(b for b in call.biases if b is not None)]
    given += call.pair or ()
    for value in given:
        if not isinstance(value, Tensor):
            raise FluxError(
                f"got {type(value).__name__} where a tensor is expected; call with x, weight, bias"
            )


@dataclass(frozen=True)
class Bound:
    """A form for a shape class, and whom it runs among."""

    name: str
    form: Callable[..., Any]
    ranks: Any  # an Arena; GroupOnly for the reference
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, call: Call) -> Any:
        """What the form of the call's operator gives."""
        if call.op == "ag_gemm":
            return self.form(
                call.x,
                call.weights,
                call.biases,
                self.ranks,
                layout=call.layout,
                num_rows=call.num_rows,
                gathered=call.gathered,
                **self.options,
            )
        (weight,), (bias,) = call.weights, call.biases
        options = self.options if call.pair is None else {**self.options, "pair": call.pair}
        return self.form(call.x, weight, bias, self.ranks, layout=call.layout, **options)
