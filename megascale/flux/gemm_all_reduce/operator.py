"""The operator `GemmAllReduce`: the row-parallel linear where no rank wants only its rows.

Legend: T rows (m), the same on all ranks; K local reduction, N columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import library
from megascale.flux.call import Call
from megascale.flux.group_operator import GroupOperator


class GemmAllReduce(GroupOperator):
    """y_TN = all_reduce(x_TK @ W) + b: the row-parallel linear of inference."""

    op = "gemm_ar"

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        weight_layout: str = "NK",
    ) -> Tensor:
        """y [T, N], summed over ranks, on every rank. Arguments as of `GemmReduceScatter`.

        Of an operator with view=True y may be memory that the next call but one overwrites. For
        views and gathered inputs of earlier calls this is as two calls.
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
            if self.settings.view:
                raise FluxError(
                    "view=True gives memory that later calls overwrite, and a compiled program may "
                    "read it after them; make the operator without it for torch.compile"
                )
            return library.gemm_all_reduce(x, weights[0], biases[0], self._key, layout)
        y_TN: Tensor = self._execute(Call(self.op, x, weights, biases, layout))
        return y_TN
