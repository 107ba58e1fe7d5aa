"""When every rank of a synthetic job did what, as arrays: the model behind `synthetic.py`.

A step of all ranks begins at one moment. Ranks wait for data, run their pipeline's schedule, reduce
gradients over data ranks, sum over the world, and update. The parameters that they gathered behind
the last update travel until a while after the step's begin: whoever begins its first forward before
that waits inside it. Every wait is the difference to the slowest member of its group, so timelines,
bubbles and waits are right by construction. Compute times are `megascale.cluster.chaos.noise`'s.
Tensor ranks keep in step inside each compute, so a pipeline is simulated once for all of them; its
schedule is `plan.schedules`'.

Suffixes: S steps, P stages, D data ranks, T tensor ranks; R = P * D * T, in the order of ranks.
Times are seconds from the step's begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks.telemetry.faults import (
    Congestion,
    Drift,
    Fault,
    GarbageGrowth,
    LateLauncher,
    MemoryPressure,
    SlowHost,
    SlowRank,
)
from benchmarks.telemetry.synthetic_program import Program
from megascale.plan.actions import Action, ActionKind
from megascale.topology import Mesh

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Shares of a rank's compute time, and of it for communication that nothing hides.
_OF_KIND = {
    ActionKind.FORWARD: 1 / 3,
    ActionKind.BACKWARD: 2 / 3,
    ActionKind.BACKWARD_INPUT: 1 / 3,
    ActionKind.BACKWARD_WEIGHT: 1 / 3,
}
SPAN_OF = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
}
TENSOR_SHARE, GRADIENT_SHARE, GATHER_SHARE, OPTIMIZER_SHARE = 0.10, 0.05, 0.02, 0.04
TRANSFER_SHARE = 0.002  # of a micro-batch's activation to the next stage
DATA_WAIT_SHARE, WORLD_SHARE = 0.001, 0.0005


@dataclass(frozen=True)
class Layout:
    """mesh, hosts and length of the parts of a job's step."""

    mesh: Mesh
    ranks_per_host: int
    compute_s: float

    @cached_property
    def host_R(self) -> Integers:
        return np.arange(self.mesh.world_size) // self.ranks_per_host

    def split(self, values_SR: Floats) -> Floats:
        """[S, P, D, T] of [S, R]."""
        mesh = self.mesh
        return values_SR.reshape(-1, mesh.pipeline, mesh.data, mesh.tensor)


@dataclass
class Times:
    """Some steps of all ranks, [S, P, D, T] or broadcastable to it.

    phases               by span name: time of a step in it
    begins, ends, ready  of every compute, [S, D], in the order of `Program.computes`, where asked
                         for: its begin and end, and when what feeds it was there
    """

    phases: dict[str, Floats]
    counts: dict[str, int]
    data_end: Floats
    pipeline_end: Floats
    gc: Floats
    launch: Floats
    gradient_end: Floats
    world_end: Floats
    optimizer_end: Floats
    step_s_S: Floats
    begins: list[Floats]
    ends: list[Floats]
    ready: list[Floats]


def compute_factor(layout: Layout, step_S: Integers, faults: Iterable[Fault]) -> Floats:
    """[S, R]: by how much faults that slow computing down multiply it."""
    factor_SR = np.ones((len(step_S), layout.mesh.world_size))
    for fault in faults:
        if isinstance(fault, SlowRank):
            ranks = np.arange(layout.mesh.world_size) == fault.rank
        elif isinstance(fault, SlowHost | MemoryPressure):
            ranks = layout.host_R == fault.host
        else:
            continue
        factor_SR[np.ix_(step_S >= fault.from_step, ranks)] *= 1 + fault.share
    return factor_SR


def drift_factor(layout: Layout, step_S: Integers, phase: str, faults: Iterable[Fault]) -> Floats:
    """[S, R] or [S, 1]: how much longer a phase takes by drifts and, of transfers, congestion."""
    factor = np.ones((len(step_S), layout.mesh.world_size))
    for fault in faults:
        if isinstance(fault, Drift) and fault.phase == phase:
            grown_S = 1 + fault.per_step * np.maximum(0, step_S - fault.from_step)
            ranks = slice(None) if fault.ranks is None else list(fault.ranks)
            factor[:, ranks] *= grown_S[:, None]
        if isinstance(fault, Congestion) and phase in ("grad_sync", "param_gather"):
            hit = np.ix_(step_S >= fault.from_step, layout.host_R == fault.host)
            factor[hit] *= fault.factor
    return factor


def step_times(
    layout: Layout,
    program: Program,
    compute_SR: Floats,
    step_S: Integers,
    faults: Iterable[Fault],
    rng: np.random.Generator,
    *,
    keep_computes: bool,
) -> Times:
    """The steps `step_S`, whose ranks compute `compute_SR` seconds."""
    faults = list(faults)
    usual_s, mesh = layout.compute_s, layout.mesh
    compute_SR = compute_SR * compute_factor(layout, step_S, faults)

    def grown(phase: str) -> Floats:
        return layout.split(drift_factor(layout, step_S, phase, faults))

    own = layout.split(compute_SR)
    noise = layout.split(rng.normal(0, 0.01, (2, *compute_SR.shape)).reshape(-1, mesh.world_size))
    data_noise, own_noise = np.split(noise, 2)
    data_wait = DATA_WAIT_SHARE * usual_s * (1 + np.abs(data_noise)) * grown("data_wait")
    growth = {"forward": grown("forward"), "backward": grown("backward")}
    own_of = {
        kind: own * _OF_KIND[kind] * growth["forward" if kind is ActionKind.FORWARD else "backward"]
        for kind in program.kinds
    }
    tensor_s = TENSOR_SHARE * usual_s if mesh.tensor > 1 else 0.0
    long_of = {  # of the slowest tensor rank, [S, P, D]
        kind: of.max(axis=3) + tensor_s * _OF_KIND[kind] for kind, of in own_of.items()
    }
    gather = (GATHER_SHARE * usual_s * grown("param_gather")).max(axis=(2, 3), keepdims=True)
    gather = gather + 0 * own
    pipeline = _Pipeline(
        layout, program, long_of, data_wait.max(axis=3), gather[..., 0], keep=keep_computes
    )
    phases: dict[str, Floats] = {"data_wait": data_wait}
    counts = {"data_wait": 1}
    num = program.shape.micro_batches * program.shape.chunks_per_stage
    for kind in program.kinds:
        phases[SPAN_OF[kind]] = long_of[kind][..., None]
        counts[SPAN_OF[kind]] = num
        if mesh.tensor > 1:
            name = "tp_gemm_reduce_scatter" if kind is ActionKind.FORWARD else "tp_row_backward"
            waited = long_of[kind][..., None] - own_of[kind]
            phases[name] = phases.get(name, 0.0) + waited
            counts[name] = counts.get(name, 0) + num
    end = pipeline.free[..., None]
    gathered = pipeline.gathered[..., None]
    phases["forward"] = phases["forward"] + gathered
    phases["param_gather"], counts["param_gather"] = gathered, 2
    if mesh.pipeline > 1:
        phases["pp_wait"] = pipeline.waited[..., None]
        counts["pp_wait"] = 2 * num
    gc, late = _pauses(layout, step_S, faults, rng, own.shape)
    if gc.any():
        phases["gc"], counts["gc"] = gc, 1
    launch = end + gc + late
    transfer = GRADIENT_SHARE * usual_s * grown("grad_sync")
    gradient_end = (launch.max(axis=2) + transfer.max(axis=2))[:, :, None, :] + 0 * launch
    phases["grad_sync"], counts["grad_sync"] = gradient_end - launch, 2
    world_end = gradient_end.max(axis=(1, 2, 3), keepdims=True) + WORLD_SHARE * usual_s
    if mesh.world_size > 1:
        phases["world_sums"], counts["world_sums"] = world_end - gradient_end, 2
    optimizer = OPTIMIZER_SHARE * usual_s * (1 + own_noise) * grown("optimizer")
    phases["optimizer"], counts["optimizer"] = optimizer, 1
    optimizer_end = world_end + optimizer
    return Times(
        phases=phases,
        counts=counts,
        data_end=data_wait.max(axis=3)[..., None],
        pipeline_end=end,
        gc=gc,
        launch=launch,
        gradient_end=gradient_end,
        world_end=world_end,
        optimizer_end=optimizer_end,
        step_s_S=optimizer_end.max(axis=(1, 2, 3)),
        begins=pipeline.begins,
        ends=pipeline.ends,
        ready=pipeline.ready,
    )


def _pauses(
    layout: Layout,
    step_S: Integers,
    faults: Iterable[Fault],
    rng: np.random.Generator,
    shape: tuple[int, ...],
) -> tuple[Floats, Floats]:
    """What keeps ranks from launching the reduce-scatter: garbage collections, and lateness."""
    gc_SR = np.zeros((len(step_S), layout.mesh.world_size))
    late_SR = np.zeros_like(gc_SR)
    for fault in faults:
        if isinstance(fault, LateLauncher):
            late_SR[step_S >= fault.from_step, fault.rank] += fault.share * layout.compute_s
        elif isinstance(fault, GarbageGrowth):
            mean_S = fault.per_step * layout.compute_s * np.maximum(0, step_S - fault.from_step)
            pauses = rng.random(gc_SR.shape) < fault.chance
            gc_SR += pauses * rng.exponential(1.0, gc_SR.shape) * mean_S[:, None]
    return gc_SR.reshape(shape), late_SR.reshape(shape)


class _Pipeline:
    """The schedule, run for all steps and data ranks at once.

    free    [S, P, D] when each stage is done
    waited  [S, P, D] how long it waited for its neighbours before that
    gathered  [S, P, D] how long its first forward waited for parameters
    """

    def __init__(
        self,
        layout: Layout,
        program: Program,
        long_of: Mapping[ActionKind, Floats],
        begin: Floats,
        gather: Floats,
        *,
        keep: bool,
    ) -> None:
        shape = program.shape
        num = shape.micro_batches * shape.chunks_per_stage
        transfer_s = TRANSFER_SHARE * layout.compute_s
        self.free, self.waited = begin.copy(), np.zeros_like(begin)
        self.gathered = np.zeros_like(begin)
        self.begins: list[Floats] = []
        self.ends: list[Floats] = []
        self.ready: list[Floats] = []
        done: dict[Action, Floats] = {}
        begun: set[int] = set()
        for compute in program.computes:
            free = self.free[:, compute.stage].copy()
            started = ready = free
            if compute.feeder is not None:
                ready = done[compute.feeder] + transfer_s
                started = np.maximum(free, ready)
                self.waited[:, compute.stage] += started - free
            end = started + long_of[compute.action.kind][:, compute.stage] / num
            if compute.stage not in begun:
                begun.add(compute.stage)
                waited = np.maximum(0, begin[:, compute.stage] + gather[:, compute.stage] - started)
                self.gathered[:, compute.stage] = waited
                end += waited
            if keep:
                self.begins.append(started)
                self.ends.append(end)
                self.ready.append(ready)
            self.free[:, compute.stage] = end
            done[compute.action] = end
