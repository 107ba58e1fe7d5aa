"""Our all-gather over symmetric memory, then cuBLAS. Nothing overlaps.

For middle sizes: the transfer costs less than NCCL's (no launch of a communication kernel on the
SMs), and cuBLAS runs at its own speed on the full shape.

Legend: T rows of all ranks, t rows of this rank, K reduction, N columns of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from megascale.flux.problem import Layout
from megascale.flux.ranks import gemm

if TYPE_CHECKING:
    from megascale.flux.arena import Arena


def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arena: Arena,
    *,
    layout: Layout,
    num_rows: int | None,
    gathered: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_TN of each weight], x_TK where `gathered`: valid until the next flux call but one)."""
    from megascale.flux.forms import forms

    x_TK = forms("all_gather")["plain"](x_tK, arena, num_rows)
    outputs = [gemm(x_TK, w, b, layout=layout) for w, b in zip(weights, biases, strict=True)]
    return outputs, x_TK if gathered else None
