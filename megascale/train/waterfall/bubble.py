"""What a schedule alone leaves idle: the pipeline's computes as they were measured, transfers free.

A stage runs its computes in the order of its actions; each begins when the stage is free and what
feeds it is there. What a stage then waits is the bubble: no faster network would take it away.
Whatever it waited beyond that in the run was communication.
"""

from __future__ import annotations

from collections.abc import Mapping

from megascale.plan.actions import COMPUTES, INPUT_GRADIENTS, Action, ActionKind, PipelineShape
from megascale.plan.schedules import build_stage

Compute = tuple[str, int, int]
"""(name of the span, chunk, micro-batch)."""

SPAN_OF = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
}


def idle_ns(
    schedule: str, shape: PipelineShape, durations_ns: Mapping[Compute, int]
) -> tuple[int, ...]:
    """For each stage: how long it waits until the last stage to finish is done.

    durations_ns  of every compute, by span; one that is absent takes no time (weight gradients that
                  were computed with those of another micro-batch)
    """
    computes = [
        [a for a in build_stage(schedule, shape, stage) if a.kind in COMPUTES]
        for stage in range(shape.stages)
    ]
    done: dict[Action, int] = {}
    free_at, busy, position = [0] * shape.stages, [0] * shape.stages, [0] * shape.stages
    inputs = next((a.kind for a in computes[0] if a.kind in INPUT_GRADIENTS), ActionKind.BACKWARD)
    while any(position[s] < len(computes[s]) for s in range(shape.stages)):
        moved = False
        for stage in range(shape.stages):
            while position[stage] < len(computes[stage]):
                action = computes[stage][position[stage]]
                feeds = _feeding(action, shape, inputs)
                if any(feed not in done for feed in feeds):
                    break
                took = durations_ns.get((SPAN_OF[action.kind], action.chunk, action.micro_batch), 0)
                start = max([free_at[stage], *(done[feed] for feed in feeds)])
                done[action] = free_at[stage] = start + took
                busy[stage] += took
                position[stage] += 1
                moved = True
        assert moved, f"{schedule} of {shape} does not end"
    end = max(free_at)
    return tuple(end - b for b in busy)


def _feeding(action: Action, shape: PipelineShape, inputs: ActionKind) -> list[Action]:
    """The computes of other chunks that `action` needs the result of."""
    chunk, m = action.chunk, action.micro_batch
    if action.kind is ActionKind.FORWARD and chunk > 0:
        return [Action(ActionKind.FORWARD, chunk - 1, m)]
    if action.kind is inputs and chunk < shape.last_chunk:
        return [Action(inputs, chunk + 1, m)]
    return []
