"""What does not fit is refused by every operator with what was got and what is legal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megascale.ops.activation import activation
from megascale.ops.column_sum import partial_column_sums
from megascale.ops.cross_entropy import cross_entropy
from megascale.ops.norm import residual_norm

T, D = 4, 6
LOW = torch.bfloat16


def _norm(
    x: Tensor | None = None,
    branch: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> object:
    x = torch.ones(T, D) if x is None else x
    return residual_norm(x, branch, torch.ones(D) if weight is None else weight, bias, 1e-5)


def _elsewhere(*shape: int) -> Tensor:
    return torch.ones(shape, device="meta")


# what is called, and what the message says
WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "x of three": (lambda: _norm(torch.ones(2, T, D)), r"x is \[2, 4, 6\] .*x.flatten\(0, -2\)"),
    "x of one": (lambda: _norm(torch.ones(D)), r"residual_norm: x is \[6\] .*legal: a matrix"),
    "whole numbers": (lambda: _norm(torch.ones(T, D, dtype=torch.int64)), "x is .*torch.int64"),
    "branch": (lambda: _norm(branch=torch.ones(1, D)), r"branch is \[1, 6\].*legal: \[4, 6\]"),
    "branch's dtype": (lambda: _norm(branch=torch.ones(T, D, dtype=LOW)), "branch is .*bfloat16"),
    "branch's device": (lambda: _norm(branch=_elsewhere(T, D)), "branch is .*on meta beside"),
    "weight": (lambda: _norm(weight=torch.ones(D - 1)), r"weight is \[5\].*legal: \[6\]"),
    "weight's dtype": (lambda: _norm(weight=torch.ones(D, dtype=LOW)), "weight is .*bfloat16"),
    "weight's device": (lambda: _norm(weight=_elsewhere(D)), "weight is .*on meta.*on cpu; bring"),
    "bias": (lambda: _norm(bias=torch.ones(1)), r"bias is \[1\].*legal: \[6\] torch.float32"),
    "activation of three": (
        lambda: activation("gelu", torch.ones(2, T, D)),
        r"activation: x is \[2, 4, 6\]",
    ),
    "activation's bias": (
        lambda: activation("gelu", torch.ones(T, D), torch.ones(1)),
        r"activation: bias is \[1\].*legal: \[6\]",
    ),
    "odd gates": (lambda: activation("swiglu", torch.ones(T, 5)), "5 columns; legal for swiglu"),
    "column sums of three": (
        lambda: partial_column_sums(torch.ones(2, T, D)),
        "partial_column_sums: x is",
    ),
    "logits of three": (
        lambda: cross_entropy(torch.ones(2, T, D), torch.zeros(T).long(), torch.ones(T)),
        "cross_entropy: logits is",
    ),
    "labels": (
        lambda: cross_entropy(torch.ones(T, D), torch.zeros(T - 1).long(), torch.ones(T)),
        r"labels is \[3\].*give one value a row",
    ),
    "mask": (
        lambda: cross_entropy(torch.ones(T, D), torch.zeros(T).long(), _elsewhere(T)),
        r"mask is \[4\] on meta",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_plain_operators_refuse_the_same() -> None:
    with pytest.raises(ValueError, match="residual_norm: x is"):
        residual_norm(torch.ones(2, T, D), None, torch.ones(D), None, 1e-5, "plain")
    with pytest.raises(ValueError, match="activation: x is"):
        activation("gelu", torch.ones(2, T, D), None, "plain")
