"""Linears of a tensor-parallel rank without their communication: what the same GEMMs take alone.

Right after a run, in its process, so that device and clocks are the run's: each kind of linear that
the probe has seen runs forward and backward with random inputs of the shapes that it had, through
the reference form, whose collectives do nothing (`silence.py`). Kinds take turns, and of many turns
the median counts. What a linear took in the step above this is exposed communication.

The weights' gradients that this adds up are nobody's any more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from megascale.ops.deferred import DeferredWork, deferring
from megascale.plan.schedules import SCHEDULES
from megascale.train.assemble import Assembly
from megascale.train.waterfall.probe import Probe, Sample
from megascale.train.waterfall.silence import silenced

WARM_UP_TURNS = 5
TURNS = 20
Points = tuple[Any, Any]
"""Begin and end, whose difference is ns."""
Times = dict[str, dict[str, int]]
"""{operator: {"op_forward" or "op_backward": ns}}."""


def alone_ns(
    probe: Probe,
    assembly: Assembly,
    *,
    turns: int = TURNS,
    timer: Callable[[], Any] | None = None,
) -> Times:
    """Of every linear that was bracketed; empty without tensor parallelism.

    timer  gives points in time whose differences are ns; None: the device's, or the host's on a CPU
    """
    if assembly.groups.tensor is None:
        return {}
    runs = {key: _Run(sample) for key, sample in sorted(probe.samples.items())}
    found: dict[str, dict[str, list[Points]]] = {
        key: {"op_forward": [], "op_backward": []} for key in runs
    }
    timer = timer or _timer(assembly.device)
    with _without_communication(assembly):
        for _ in range(WARM_UP_TURNS + turns):  # no time is read in between: the device never idles
            for key, run in runs.items():
                for name, points in run.once(timer, _work_of(assembly)).items():
                    found[key][name].append(points)
    return {
        key: {name: _median_ns(points[WARM_UP_TURNS:]) for name, points in of_key.items()}
        for key, of_key in found.items()
    }


def _median_ns(points: Sequence[Points]) -> int:
    return round(statistics.median(end - begin for begin, end in points))


def _work_of(assembly: Assembly) -> DeferredWork | None:
    """Where the run puts its weight gradients off, so that a linear's backward has none: as
    `PipelineRuntime` does, copies of what is gathered included. None where it does not."""
    par = assembly.config.parallelism
    joins = par.join_weight_gradients > 1
    if not joins and not SCHEDULES[par.schedule].splits_backward:
        return None
    return DeferredWork(keeps_gathered=joins)


def _without_communication(assembly: Assembly) -> AbstractContextManager[object]:
    stack = ExitStack()
    stack.enter_context(silenced())
    for operator in (assembly.ops.all_gather_gemm, assembly.ops.gemm_reduce_scatter):
        stack.enter_context(operator.in_reference_form())
    return stack


class _Run:
    """One kind of linear with inputs of its own."""

    def __init__(self, sample: Sample) -> None:
        self._call = sample.call
        self._given: list[Any] = list(sample.arguments)
        for i in sample.inputs:
            shape, dtype, device = sample.arguments[i]
            x = torch.randn(shape, dtype=dtype, device=device)
            self._given[i] = x.requires_grad_()
        self._inputs = [self._given[i] for i in sample.inputs]
        self._gradient: Tensor | None = None

    def once(self, timer: Callable[[], Any], work: DeferredWork | None) -> Mapping[str, Points]:
        """Forward and backward, whose weight gradients are left in `work` where there is one."""
        begin = timer()
        y = self._call(*self._given)
        middle = timer()
        if self._gradient is None:
            self._gradient = torch.randn_like(y)
        with nullcontext() if work is None else deferring(work):
            before_backward = timer()
            torch.autograd.backward(y, self._gradient)
            end = timer()
        for x in self._inputs:
            x.grad = None
        return {"op_forward": (begin, middle), "op_backward": (before_backward, end)}


def _timer(device: torch.device) -> Callable[[], Any]:
    """Gives points in time, whose differences are ns once the work before them is done."""
    return _Point if device.type == "cuda" else time.monotonic_ns


class _Point:
    """A CUDA event on the current stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, other: _Point) -> int:
        self._event.synchronize()
        return round(other._event.elapsed_time(self._event) * 1e6)
