"""What the three operators share: a group, settings, and the way of a call.

A call is refused, or bound to a form (`selection.py`), and runs; one rank is a GEMM
(`one_rank.py`). In debug mode all ranks hear of a call before it begins, and its end is waited for
(`deadline.py`). While `torch.compile` traces, it is a node of the graph instead (`library.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megascale.errors import FluxError
from megascale.flux import library
from megascale.flux.call import Bound, Call
from megascale.flux.deadline import Deadline
from megascale.flux.mode import FluxMode
from megascale.flux.one_rank import check_alone, run_alone
from megascale.flux.problem import Op, refuse_unknown_rows
from megascale.flux.selection import Selection
from megascale.flux.settings import Settings
from megascale.flux.tuner import Tune

Started = Callable[[], Tensor]
"""Ends what was started: waits for it (on CUDA the stream does) and gives the tensor."""


class GroupOperator:
    """An operator of a group of ranks, with its settings.

    group        ranks among which it runs; None: this process alone
    mode         see `operators.py`
    tune         "now" measures all forms at the first call of a shape class (mode "auto")
    spin         False where NCCL transfers may be pending beside a call and no SMs are reserved for
                 them: "auto" then leaves out kernels that fill the GPU and wait (`mode.py`)
    reserve_sms  SMs that fused kernels leave to NCCL
    deadline_s   debug mode: a call that does not end raises and says who is missing
    cache        file with the tuner's choices; those shipped with the package count in any case
    in_flight    GemmReduceScatter alone: tiles may be added up at their owner, each sum rounded to
                 the type of x, in one shard of symmetric memory (`gemm_reduce_scatter/in_flight`).
                 Mode "auto" then tries that too where it measures; "fused" takes it
    view         GemmAllReduce alone: the result may be symmetric memory, which is valid until the
                 next flux call but one of the group begins (in a CUDA graph, and after a capture:
                 until the next call or replay). Saves the copy out of it in forms that have one
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
        in_flight: bool = False,
        view: bool = False,
    ) -> None:
        _check_group(group)
        if in_flight and self.op != "gemm_rs":
            raise FluxError(
                f"in_flight is {in_flight!r}, and {type(self).__name__} has no such form: it is an "
                "option of GemmReduceScatter"
            )
        if view and self.op != "gemm_ar":
            raise FluxError(
                f"view is {view!r}, and {type(self).__name__} always gives tensors of its own: it "
                "is an option of GemmAllReduce"
            )
        settings = Settings(mode, tune, spin, reserve_sms, deadline_s, cache, in_flight, view)
        self.settings = settings
        self.group = group
        self.world_size = 1 if group is None else group.size()
        self.rank = 0 if group is None else dist.get_rank(group)
        self._selection: Selection | None = None
        self._deadline: Deadline | None = None
        self._key = ""
        if group is not None and self.world_size > 1:
            self._selection = Selection(group, settings)
            self._deadline = None if deadline_s is None else Deadline(group, deadline_s)
            # The compiler's cache on disk may offer a graph to another rank, or to another job.
            place = f"rank {self.rank} of {self.world_size} in {group.group_name}"
            self._key = f"{self.op} of {place}, {settings}"
            library.register(self._key, self)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.world_size} ranks, mode "{self.settings.mode}")'

    @contextmanager
    def in_reference_form(self) -> Iterator[None]:
        """Calls inside take the reference form, whatever the mode: to measure against it."""
        selection = self._selection
        if selection is not None and self.group is not None:
            self._selection = Selection(self.group, replace(self.settings, mode="reference"))
        try:
            yield
        finally:
            self._selection = selection

    def forms_taken(self) -> dict[str, str]:
        """The form of each problem that was called so far, by the problem in words."""
        answers = () if self._selection is None else self._selection.answers()
        return {
            f"{self.op} m{problem.m} n{problem.n} k{problem.k} {problem.layout}": bound.name
            for problem, bound in answers
        }

    def _execute(self, call: Call) -> Any:
        """Check, choose and run."""
        bound = self._bind(call)
        return run_alone(call) if bound is None else self._ended(bound, call)

    def _bind(self, call: Call) -> Bound | None:
        """The form for the call; None where there is nobody or nothing to exchange."""
        if self._selection is None:
            check_alone(call)
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


def _check_group(group: Any) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        hint = "it is what new_group gives to a process that is no member: do not make one there"
        if hasattr(group, "get_group"):
            hint = "of a DeviceMesh pass mesh.get_group(name)"
        raise FluxError(f"group is {group!r}; it must be a process group, or None; {hint}")
