"""The operators that a user calls: all-gather + GEMM, GEMM + reduce-scatter, GEMM + all-reduce.

    gather = AllGatherGemm(group)                  # once
    y_TN = gather(x_tK, weight_NK, bias_N)         # every call

A call refuses wrong arguments (`problem.check`), takes a form (`selection.py`) and runs it.

| mode | runs | where it cannot |
|---|---|---|
| auto | what was measured as the fastest, else the default rule | the reference, logged once |
| fused | one kernel for communication and GEMM | FluxError with the reason |
| chunked | cuBLAS on chunks beside copy engines | FluxError with the reason |
| reference | the backend's collective, then the GEMM | |

One rank (group None, or of one rank) is a plain GEMM in every mode.

**Contract.** All ranks of the group make the same calls in the same order, with equal m, n, k, type
and `weight_layout`, by operators with equal mode, tune, spin, reserve_sms and deadline_s; a weight
is contiguous and 16-byte aligned on all of them or on none. Forms are chosen by these: ranks that
differ may take different forms and wait for ever. Local checks precede every launch, but a rank
sees its own rows and arguments only, so it may refuse what its peers take (of 4 rows on each of two
ranks and num_rows=9 only rank 0 sees that a row is missing). `deadline_s` is for that
(`deadline.py`): all ranks then hear who differs or has refused. The current device is x's.

The first call of a group is collective beyond its own operation (machine facts, tuning cache,
symmetric memory) and may not be captured into a CUDA graph; later ones may.

These compute values, not gradients, and refuse tensors that ask for them: a result without history
would end a backward pass silently. `autograd.py` has the differentiable linears.

Cost on the host: about 6 us a call beside the form's own.

Legend: T rows of all ranks (m), t rows of this rank (c = ceil(m / W), the last ranks fewer or
none), K reduction, N output columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import collectives, library
from megascale.flux.call import Bound, Call, check_sum, check_tensors
from megascale.flux.deadline import Deadline
from megascale.flux.gemm_reduce_scatter.pair import sum_of_products
from megascale.flux.mode import FluxMode
from megascale.flux.problem import Op, check, check_rows, refuse_unknown_rows
from megascale.flux.ranks import gemm, padded
from megascale.flux.selection import Selection
from megascale.flux.settings import Settings
from megascale.flux.tiles import shard_rows
from megascale.flux.tuner import REFERENCE, Tune

Started = Callable[[], Tensor]
"""Ends what was started: waits for it (on CUDA the stream does) and gives the tensor."""


class _Operator:
    """What the three operators share.

    group        ranks among which it runs; None: this process alone
    mode         see the module
    tune         "now" measures all forms at the first call of a shape class (mode "auto")
    spin         False where NCCL transfers may be pending beside a call and no SMs are reserved for
                 them: "auto" then leaves out kernels that fill the GPU and wait (`mode.py`)
    reserve_sms  SMs that fused kernels leave to NCCL
    deadline_s   debug mode: a call that does not end raises and says who is missing
    cache        file with the tuner's choices; those shipped with the package count in any case
    """

    op: ClassVar[Op]

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        mode: FluxMode = "auto",
        tune: Tune = "cache",
        spin: bool = True,
        reserve_sms: int = 0,
        deadline_s: float | None = None,
        cache: str | None = None,
    ) -> None:
        _check_group(group)
        self.settings = settings = Settings(mode, tune, spin, reserve_sms, deadline_s, cache)
        self.group = group
        self.world_size = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self._selection: Selection | None = None
        self._deadline: Deadline | None = None
        self._key = ""
        if group is not None and self.world_size > 1:
            self._selection = Selection(group, settings)
            self._deadline = None if deadline_s is None else Deadline(group, deadline_s)
            self._key = f"{self.op} of {group.group_name}, {settings}"
            library.register(self._key, self)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.world_size} ranks, mode "{self.settings.mode}")'

    def _execute(self, call: Call) -> Any:
        """Check, choose and run."""
        bound = self._bind(call)
        return _alone(call) if bound is None else self._ended(bound, call)

    def _bind(self, call: Call) -> Bound | None:
        """The form for the call; None where there is nobody or nothing to exchange."""
        if self._selection is None:
            _check_alone(call)
            return None
        if self._deadline is not None:  # first: the first call of a group is collective to bind
            self._deadline.roll_call(self.op, partial(self._selection.checks.described, call))
        problem, bound = self._selection.bind(call)
        if problem.m:
            return bound
        if call.op == "ag_gemm" and call.num_rows is None:
            refuse_unknown_rows(0)
        return None

    def _ended(self, bound: Bound, call: Call) -> Any:
        """Run it; in debug mode to its end."""
        if self._deadline is None:
            return bound.run(call)
        with self._deadline.watch(self.op, getattr(bound.ranks, "report", None)):
            return bound.run(call)

    def refused(self, error: FluxError) -> FluxError:
        """`error`, of a call that this rank refuses; in debug mode the peers are told."""
        if self._deadline is not None and not torch.compiler.is_compiling():
            self._deadline.refused(error)
        return error

    def _refuse_gradients(self, *tensors: Any) -> None:
        if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors):
            raise self.refused(
                FluxError(
                    "an argument requires a gradient, and this operator computes none; call it "
                    "under torch.no_grad(), or use column_parallel_linear and row_parallel_linear "
                    "of megascale.flux"
                )
            )

    def _in_graph(self) -> bool:
        """A graph is being traced, and there is something to exchange."""
        return bool(self._key) and torch.compiler.is_compiling()


class AllGatherGemm(_Operator):
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
        A rank compares num_rows with its own rows only: see the module's contract.
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
        x_tK = padded(x_tK, -(-num_rows // self.world_size))
        pending = collectives.start_all_gather(x_tK, self.group)
        return lambda: pending.wait()[:num_rows], None


class GemmReduceScatter(_Operator):
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
            y_tN = _alone(call)
            return lambda: y_tN
        if bound.name != REFERENCE or self._deadline is not None:
            y_tN = self._ended(bound, call)
            return lambda: y_tN
        partial_TN = gemm(x_TK, weight, layout=weight_layout)  # type: ignore[arg-type] # checked
        first, end = shard_rows(x_TK.shape[0], self.world_size, self.rank)
        whole_TN = padded(partial_TN, -(-x_TK.shape[0] // self.world_size) * self.world_size)
        pending = collectives.start_reduce_scatter(whole_TN, self.group)
        return lambda: pending.wait()[: end - first]

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


class GemmAllReduce(_Operator):
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
        """y [T, N], summed over ranks, on every rank. Arguments as of `GemmReduceScatter`."""
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
            return library.gemm_all_reduce(x, weights[0], biases[0], self._key, layout)
        y_TN: Tensor = self._execute(Call(self.op, x, weights, biases, layout))
        return y_TN


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        hint = "it is what new_group gives to a process that is no member: do not make one there"
        if hasattr(group, "get_group"):
            hint = "of a DeviceMesh pass mesh.get_group(name)"
        raise FluxError(f"group is {group!r}; it must be a process group, or None; {hint}")


def _check_alone(call: Call) -> None:
    check_tensors(call)
    problems = [
        check(p.op, p.x, p.weights, p.biases, None, p.layout, p.num_rows, names=p.names)
        for p in ([call] if call.pair is None else [call, call.second])
    ]
    if call.pair is not None:
        check_sum(call, *problems)


def _alone(call: Call) -> Any:
    """What one rank computes: the GEMM. Rounds where the reference form does, so that one rank and
    several differ in the order of sums alone: a row-parallel bias comes after the product."""
    layout: Any = call.layout  # checked
    if call.op == "ag_gemm":
        terms = zip(call.weights, call.biases, strict=True)
        outputs = [gemm(call.x, weight, bias, layout=layout) for weight, bias in terms]
        return outputs, call.x if call.gathered else None
    if call.pair is None:
        y = gemm(call.x, call.weights[0], layout=layout)
    else:
        y = sum_of_products(call.x, call.weights[0], layout, call.pair)
    return y if call.biases[0] is None else y.add_(call.biases[0])


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
