"""One call of an operator, what it looks like, and the form that makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux.problem import Op, Problem, same_kind


@dataclass
class Call:
    """The arguments of one call, as `problem.check` describes them.

    pair   a second (x, weight) of gemm_rs, whose product is added (`gemm_reduce_scatter/pair.py`)
    names  what messages call x and weight
    """

    op: Op
    x: Tensor
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    layout: str
    num_rows: int | None = None
    gathered: bool = False
    pair: tuple[Tensor, Tensor] | None = None
    names: tuple[str, str] = ("x", "weight")

    @property
    def second(self) -> Call:
        """The call of the pair alone."""
        assert self.pair is not None
        x, weight = self.pair
        return Call(self.op, x, [weight], [None], self.layout, names=("b", "weight_b"))


def look_of(call: Call) -> object | None:
    """What the form for it depends on, as a key; None where an argument is no tensor.

    Addresses are in it only as far as 16 divides those of weights, which kernels need. The current
    device is (0.1 us): a call under another one than that of x is refused at every call.
    """
    x, misaligned = call.x, 0
    try:
        parts: list[object] = [x.shape, x.dtype, x.device]
        if x.is_cuda:
            parts += (torch.cuda.is_current_stream_capturing(), torch.cuda.current_device())
        for weight in call.weights:
            parts += (weight.shape, weight.stride(), weight.dtype, weight.device)
            misaligned |= weight.data_ptr()
        for bias in call.biases:
            parts += (None,) if bias is None else (bias.shape, bias.dtype, bias.device)
        if call.pair is not None:
            parts.append(look_of(call.second))
    except AttributeError:
        return None
    return (call.layout, type(call.num_rows), call.num_rows, misaligned % 16 == 0, *parts)


def is_captured(x: Tensor) -> bool:
    """What is done with `x` now goes into a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def check_tensors(call: Call) -> None:
    """FluxError where an argument is no tensor."""
    of_x, of_weight = call.names
    given: list[tuple[str, Any]] = [(of_x, call.x)]
    given += [(of_weight, weight) for weight in call.weights]
    given += [("bias", bias) for bias in call.biases if bias is not None]
    if call.pair is not None:
        given += zip(call.second.names, call.pair, strict=True)
    for name, value in given:
        if not isinstance(value, Tensor):
            raise FluxError(f"{name} is {_short(value)}; it must be a tensor")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def check_sum(call: Call, one: Problem, other: Problem) -> None:
    """FluxError where the two products of `call` cannot be summed."""
    assert call.pair is not None
    same_kind("b", call.pair[0], "a", call.x)  # each weight is what its input is
    if (one.m, one.n) != (other.m, other.n):
        raise FluxError(
            f"the products are [{one.m}, {one.n}] and [{other.m}, {other.n}]; to be summed "
            "they must be equal"
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
