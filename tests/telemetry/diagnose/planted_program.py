"""The program of a rank of a pipeline stage, as operations of `planted.py`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from megascale.plan.actions import RECEIVES, SENDS, Action, ActionKind, PipelineShape
from megascale.plan.schedules import build_stage
from megascale.topology import Mesh

_PHASES = {"F": "forward", "B": "backward", "BI": "backward_input", "BW": "backward_weight"}


@dataclass(frozen=True)
class Layout:
    mesh: Mesh
    micro_batches: int = 4
    chunks: int = 1
    tensor_ops: int = 4  # a computation
    schedule: str = "1f1b"


LAYOUTS = {
    "tp8": Layout(Mesh(8, 1, 1)),
    "dp8": Layout(Mesh(1, 8, 1)),
    "pp8": Layout(Mesh(1, 1, 8), micro_batches=8),
    "pp4-dp2": Layout(Mesh(1, 2, 4)),
    "tp2-dp4": Layout(Mesh(2, 4, 1)),
    "tp4-pp2": Layout(Mesh(4, 1, 2)),
    "tp2-pp4": Layout(Mesh(2, 1, 4)),
    "tp2-pp2-dp2": Layout(Mesh(2, 2, 2)),
    "tp2-pp4-vp2": Layout(Mesh(2, 1, 4), chunks=2, schedule="interleaved_1f1b"),
    "pp2-dp4-zb": Layout(Mesh(1, 4, 2), schedule="zb_h1"),
}
LARGE = Layout(Mesh(8, 192, 8), micro_batches=8, tensor_ops=1)  # 12,288 ranks


@dataclass(frozen=True)
class Op:
    """What a rank does next. `kind`: mark, post, wait, send or await; `group`: or the channel."""

    kind: str
    phase: str | None = None
    chunk: int | None = None
    micro_batch: int | None = None
    group: str | None = None
    name: str = ""  # collectives of one meeting have one name, or it never ends
    cost_s: float = 0.0


@cache
def stage_program(layout: Layout, stage: int) -> tuple[Op, ...]:
    """Three steps of a rank of `stage`."""
    mesh = layout.mesh
    shape = PipelineShape(mesh.pipeline, layout.chunks, layout.micro_batches)
    actions = build_stage(layout.schedule, shape, stage)
    weights = [a for a in actions if a.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)]
    last_of = {action.chunk: action for action in weights}
    step = [Op("mark", "data_wait", cost_s=0.002)]
    for index, action in enumerate(actions):
        step += _of_action(layout, shape, stage, action, index)
        if last_of.get(action.chunk) is action and mesh.data > 1:
            step += _collective("data", f"reduce {action.chunk}", phase="grad_sync")
    step += _collective("world", "sums")
    step.append(Op("mark", "grad_sync"))
    if mesh.data > 1:
        step.append(Op("wait", "finish", group="data"))
    step += [*_collective("tensor", "replicated"), Op("wait", "tensor", group="tensor")]
    step += [Op("wait", "sums", group="world"), Op("mark", "optimizer", cost_s=0.01)]
    step += [Op("post", group="world", name="norms"), Op("wait", "norms", group="world")]
    if mesh.data > 1:
        for chunk in last_of:
            step += _collective("data", f"gather {chunk}", phase="param_gather")
    return tuple(step * 3)


def _collective(group: str, name: str, phase: str | None = None) -> list[Op]:
    return [Op("mark", phase, group=group), Op("post", group=group, name=name)]


def _of_action(
    layout: Layout, shape: PipelineShape, stage: int, action: Action, index: int
) -> list[Op]:
    chunk, m = action.chunk, action.micro_batch
    if action.kind in SENDS or action.kind in RECEIVES:
        channel = action.channel(stage)
        name = f"{channel.source}->{channel.destination} {channel.payload.value}"
        phase = "send" if action.kind in SENDS else "recv"
        ops = [Op("mark", phase, chunk, m, name)]
        return [*ops, Op("send", group=name)] if action.kind in SENDS else ops
    ops = []
    source = _source(shape, stage, action)
    if source is not None:
        ops += [Op("mark"), Op("await", "pp_wait", group=source)]
    ops.append(Op("mark", _PHASES[action.kind.value], chunk, m, cost_s=0.01))
    if index < 3 and action.kind is ActionKind.FORWARD and layout.mesh.data > 1:
        ops += [Op("mark", "param_gather"), Op("wait", "gather", group="data")]
    for number in range(layout.tensor_ops if action.kind.value != "BW" else 0):
        ops += _collective("tensor", "reduce_scatter" if number % 2 else "all_gather")
        ops += [Op("wait", "tensor", group="tensor"), Op("mark", cost_s=0.004)]
    return ops


def _source(shape: PipelineShape, stage: int, action: Action) -> str | None:
    """The channel that feeds a computation."""
    if action.kind is ActionKind.FORWARD and action.chunk > 0:
        return f"{shape.stage_of(action.chunk - 1)}->{stage} activation"
    if action.kind.value in ("B", "BI") and action.chunk < shape.last_chunk:
        return f"{shape.stage_of(action.chunk + 1)}->{stage} gradient"
    return None
