"""GPipe: all forwards, then all backwards (1811.06965). The plain reference among the schedules.

Costs most memory: every micro-batch is in flight at once.
"""

from __future__ import annotations

from megascale.plan.actions import Action, ActionKind, PipelineShape
from megascale.plan.schedules.rounds import Round


def rounds(shape: PipelineShape, stage: int) -> list[Round]:
    assert shape.chunks_per_stage == 1, f"gpipe runs one chunk a stage, got {shape}"
    forwards = [(Action(ActionKind.FORWARD, stage, m),) for m in range(shape.micro_batches)]
    backwards = [(Action(ActionKind.BACKWARD, stage, m),) for m in range(shape.micro_batches)]
    return [*forwards, *backwards]


def in_flight_limit(shape: PipelineShape, _stage: int) -> int:
    return shape.micro_batches
