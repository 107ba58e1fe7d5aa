"""The operator `GemmReduceScatter`: of one product, or of the sum of two.

Legend: T rows of all ranks (m), t rows of this rank (c = ceil(m / W), the last ranks fewer or
none), K and J local reductions, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megascale.flux import library
from megascale.flux.call import Call
from megascale.flux.gemm_reduce_scatter.nccl import start_gemm_reduce_scatter
from megascale.flux.group_operator import GroupOperator, Started
from megascale.flux.one_rank import run_alone
from megascale.flux.tuner import REFERENCE


class GemmReduceScatter(GroupOperator):
    """y_tN = reduce_scatter(x_TK @ W) + b: the row-parallel linear (Flux 3.1)."""

    op = "gemm_rs"

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        weight_layout: str = "NK",
    ) -> Tensor:
        """y [t, N]: the own rows of the product summed over ranks.

        x       [T, K], K of this rank; T need not be a multiple of ranks
        weight  [N, K] ("NK") or [K, N] ("KN"), of x's dtype and device
        bias    [N], the same on all ranks; added once
        Raises FluxError before anything is launched.
        """
        self._refuse_gradients(x, weight, bias)
        return self.run(x, [weight], [bias], weight_layout)

    def run(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        layout: str,
    ) -> Tensor:
        """The call with plain arguments."""
        if self._in_graph():
            return library.gemm_reduce_scatter(x, weights[0], biases[0], self._key, layout)
        y_tN: Tensor = self._execute(Call(self.op, x, weights, biases, layout))
        return y_tN

    def start(self, x_TK: Tensor, weight: Tensor, *, weight_layout: str = "NK") -> Started:
        """The same, where what is computed until the end is asked for may hide the transfer.

        Only the reference leaves anything to hide: its reduce-scatter runs on NCCL's stream. The
        other forms hide it under this GEMM.
        """
        self._refuse_gradients(x_TK, weight)
        call = Call(self.op, x_TK, [weight], [None], weight_layout)
        if self._in_graph():
            y_tN = self.run(x_TK, [weight], [None], weight_layout)
            return lambda: y_tN
        bound = self._bind(call)
        if bound is None:
            y_tN = run_alone(call)
            return lambda: y_tN
        if bound.name != REFERENCE or self._deadline is not None:
            y_tN = self._ended(bound, call)
            return lambda: y_tN
        layout: Any = weight_layout  # checked
        return start_gemm_reduce_scatter(x_TK, weight, bound.ranks, layout=layout)

    def pair(
        self,
        a: Tensor,
        weight_a: Tensor,
        b: Tensor,
        weight_b: Tensor,
        bias: Tensor | None = None,
        *,
        weight_layout: str = "NK",
    ) -> Tensor:
        """y [t, N] = reduce_scatter(a @ A + b @ B) + bias: two products, one transfer.

        a, b                [T, K] and [T, J] of this rank
        weight_a, weight_b  [N, K] and [N, J] ("NK"), or their transposes ("KN")
        Received tiles are summed in fp32, also where `in_flight` allows less.
        Raises FluxError before anything is launched.
        """
        self._refuse_gradients(a, weight_a, b, weight_b, bias)
        if self._in_graph():
            return library.gemm_reduce_scatter_pair(
                a, weight_a, b, weight_b, bias, self._key, weight_layout
            )
        names = ("a", "weight_a")
        call = Call(self.op, a, [weight_a], [bias], weight_layout, pair=(b, weight_b), names=names)
        y_tN: Tensor = self._execute(call)
        return y_tN
