"""The contract between a parameter's `main_grad` and everybody who adds to it.

`parameter.main_grad` is a tensor of the parameter's shape in the main dtype, set by its owner. It
may carry the mark `main_grad_stale`: then it holds what an earlier step left, and the first
contribution of this step overwrites it instead of adding to it. So a matrix's gradient is not
zeroed, which would be one more pass over 4 bytes a parameter, and not read by its first weight-
gradient GEMM. Who contributes calls `take_stale` at the moment of writing, also where the writing
is deferred; what is still marked when the step's last contribution is in, its owner zeroes.
"""

from __future__ import annotations

from torch import Tensor

MARK = "main_grad_stale"


def mark_stale(parameter: Tensor) -> None:
    """From here on the values in `parameter.main_grad` count for nothing."""
    setattr(parameter, MARK, True)


def take_stale(parameter: Tensor) -> bool:
    """Whether the caller must overwrite `parameter.main_grad`, not add to it. Clears the mark."""
    is_stale = getattr(parameter, MARK, False)
    if is_stale:
        setattr(parameter, MARK, False)
    return is_stale


def add_ordinary_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Add to `parameter.grad`, as autograd would: for what was deferred and has no main gradient.
    None: there is nothing to add, it went to the main gradient."""
    if gradient is not None:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def add_to_main_gradient(parameter: Tensor, contribution: Tensor) -> None:
    """One contribution of the parameter's shape, in any dtype."""
    main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    if take_stale(parameter):
        main_grad.copy_(contribution)
    else:
        main_grad.add_(contribution)
