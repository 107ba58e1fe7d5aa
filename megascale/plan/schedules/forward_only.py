"""Forward passes alone, for validation: groups of p micro-batches through each chunk in turn.

Unlike the training schedules it takes any number of micro-batches; the last group may be smaller.
"""

from __future__ import annotations

from megascale.plan.actions import Action, ActionKind, PipelineShape
from megascale.plan.schedules.rounds import Round


def rounds(shape: PipelineShape, stage: int) -> list[Round]:
    return [
        (Action(ActionKind.FORWARD, chunk, m),)
        for first in range(0, shape.micro_batches, shape.stages)
        for chunk in shape.chunks_of(stage)
        for m in range(first, min(first + shape.stages, shape.micro_batches))
    ]


def in_flight_limit(_shape: PipelineShape, _stage: int) -> int:
    """Nothing is kept for a backward; the checker counts forwards without one as 0."""
    return 0
