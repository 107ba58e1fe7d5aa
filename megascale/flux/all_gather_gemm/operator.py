"""The operator `AllGatherGemm`: one gather for one weight or several, or for none.

Legend: T rows of all ranks (m), t rows of this rank (c = ceil(m / W), the last ranks fewer or
none), K reduction, N output columns of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import collectives, library
from megascale.flux.call import Call
from megascale.flux.group_operator import GroupOperator, Started
from megascale.flux.problem import check_rows
from megascale.flux.ranks import padded
from megascale.flux.tiles import rows_per_rank


class AllGatherGemm(GroupOperator):
    """y_TN = all_gather(x_tK) @ W + b: the column-parallel linear (Flux 3.2)."""

    op = "ag_gemm"

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | Sequence[Tensor | None] | None = None,
        *,
        weight_layout: str = "NK",
        num_rows: int | None = None,
        return_gathered: bool = False,
    ) -> Any:
        """y [T, N]; a list of them for a sequence of weights, which one gather feeds.

        x         [t, K]: rows min(r c, T) to min((r + 1) c, T) on rank r
        weight    [N, K] ("NK", as nn.Linear stores it) or [K, N] ("KN"), of x's dtype and device
        bias      [N]; for several weights one (or None) each
        num_rows  T, where ranks hold unequal shares; else T is t times ranks
        return_gathered  give (y, x_TK); x_TK is valid until the next flux call but one of this
                  group begins: clone what must live longer
        A rank compares num_rows with its own rows only: see the contract of `operators.py`.
        Raises FluxError before anything is launched.
        """
        several = not isinstance(weight, Tensor)
        try:
            weights = [weight] if isinstance(weight, Tensor) else _listed(weight)
            biases = _one_each(bias, len(weights), several)
        except FluxError as error:
            raise self.refused(error)  # noqa: B904 - it is the same error
        self._refuse_gradients(x, *weights, *biases)
        outputs, gathered = self.run(x, weights, biases, weight_layout, num_rows, return_gathered)
        y = outputs if several else outputs[0]
        return (y, gathered) if return_gathered else y

    def run(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        layout: str,
        num_rows: int | None,
        gathered: bool,
    ) -> tuple[list[Tensor], Tensor | None]:
        """The call with plain arguments; always (outputs, x_TK or None)."""
        if self._in_graph():
            found = library.all_gather_gemm(
                x, weights, biases, self._key, layout, num_rows, gathered
            )
            return found[: len(weights)], found[-1] if gathered else None
        call = Call(self.op, x, weights, biases, layout, num_rows, gathered)
        found_now: tuple[list[Tensor], Tensor | None] = self._execute(call)
        return found_now

    def start_all_gather(self, x_tK: Tensor, num_rows: int | None = None) -> Started:
        """Begin to gather rows without a GEMM (what only a weight gradient needs).

        `x_tK` has been the input of this operator, or could be: arguments as of a call, and the
        same refusals. The result is valid as long as a gathered input.
        """
        self._refuse_gradients(x_tK)
        if self._in_graph():
            x_TK = library.all_gather(x_tK, self._key, num_rows)
            return lambda: x_TK
        if self._selection is None:
            check_rows(x_tK, num_rows, None)
            return lambda: x_tK
        if self._deadline is not None:
            describe = partial(self._selection.checks.described_rows, x_tK, num_rows)
            self._deadline.roll_call("all_gather", describe)
        num_rows = self._selection.checks.rows(x_tK, num_rows)
        if num_rows == 0:
            return lambda: x_tK
        started, report = self._start_all_gather(x_tK, num_rows)
        return started if self._deadline is None else partial(self._watched, started, report)

    def _watched(self, started: Started, report: Tensor | None) -> Tensor:
        assert self._deadline is not None
        with self._deadline.watch("all_gather", report):
            return started()

    def _start_all_gather(self, x_tK: Tensor, num_rows: int) -> tuple[Started, Tensor | None]:
        """How to end it, and where its kernels report."""
        assert self._selection is not None
        arena = self._selection.arena_for_rows(x_tK, spins=False)
        if arena is not None:
            from megascale.flux.symmetric.all_gather import start_all_gather

            return start_all_gather(x_tK, arena, num_rows).wait, arena.report
        x_tK = padded(x_tK, rows_per_rank(num_rows, self.world_size))
        pending = collectives.start_all_gather(x_tK, self.group)
        return lambda: pending.wait()[:num_rows], None


def _listed(weights: Any) -> list[Tensor]:
    try:
        return list(weights)
    except TypeError:
        raise FluxError(
            f"weight is {weights!r}; it must be a tensor, or a sequence of tensors"
        ) from None


def _one_each(
    bias: Tensor | Sequence[Tensor | None] | None, count: int, several: bool
) -> list[Tensor | None]:
    if bias is None:
        return [None] * count
    if not isinstance(bias, Tensor | Sequence):
        raise FluxError(f"bias is {bias!r}; give a tensor, a list of one (or None) each, or None")
    if several == isinstance(bias, Tensor):
        given = "one tensor" if several else "a sequence"
        wanted = "a sequence with one each" if several else "one tensor"
        raise FluxError(f"bias is {given} for {count} weight(s); give {wanted}, or None")
    return [bias] if isinstance(bias, Tensor) else list(bias)
