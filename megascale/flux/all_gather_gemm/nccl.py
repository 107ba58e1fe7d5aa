"""All-gather by the process group's backend (NCCL; gloo on CPU), then one GEMM a weight.

Nothing overlaps. This is the baseline of the bench, the tuner's candidate that always exists, and
what defines the result of the other forms.

Legend: T rows of all ranks, t rows of this rank, K reduction, N columns of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megascale.flux.collectives import all_gather_into
from megascale.flux.problem import Layout
from megascale.flux.ranks import Ranks, gemm, padded
from megascale.flux.tiles import rows_per_rank


def all_gather_gemm(
    x_tK: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    arena: Ranks,
    *,
    layout: Layout,
    num_rows: int | None,
    gathered: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """([y_TN of each weight], x_TK where `gathered`).

    num_rows  m, where not every rank owns equally many rows (see the package's contract)
    """
    world_size = arena.world_size
    num_rows = x_tK.shape[0] * world_size if num_rows is None else num_rows
    c = rows_per_rank(num_rows, world_size)
    x_TK = x_tK.new_empty(c * world_size, x_tK.shape[1])
    all_gather_into(x_TK, padded(x_tK, c), arena.group).wait()
    x_TK = x_TK[:num_rows]
    outputs = [gemm(x_TK, w, b, layout=layout) for w, b in zip(weights, biases, strict=True)]
    return outputs, x_TK if gathered else None
