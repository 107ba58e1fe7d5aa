"""What operators refuse before a kernel reads past a tensor's end, or beside its columns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_matrix(operator: str, name: str, x: Tensor) -> None:
    """Raises ValueError where `x` is no matrix of floating-point numbers."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{operator}: {name} is {_look(x)}; legal: a matrix of floating-point numbers, a token "
            "a row; join leading dimensions with x.flatten(0, -2)"
        )


def check_beside(
    operator: str, name: str, tensor: Tensor | None, shape: Sequence[int], x: Tensor
) -> None:
    """Raises ValueError where `tensor` is not of `shape` and of the dtype and device of `x`."""
    if tensor is None:
        return
    if tensor.shape != shape or tensor.dtype != x.dtype or tensor.device != x.device:
        raise ValueError(
            f"{operator}: {name} is {_look(tensor)} beside {_look(x)}; legal: {list(shape)} "
            f"{x.dtype} on {x.device}; bring it there with {name}.to(x), or give another"
        )


def _look(x: Tensor) -> str:
    return f"{list(x.shape)} {x.dtype} on {x.device}"
