"""1F1B (PipeDream-flush; Megatron-LM, 2104.04473 section 2.2): one forward, one backward in turn.

warm-up    min(p - 1 - stage, m) forwards     until the first gradient can come back
steady     m - warm-up times: one forward, one backward
cool-down  warm-up backwards
"""

from __future__ import annotations

from megascale.plan.actions import Action, ActionKind, PipelineShape
from megascale.plan.schedules.rounds import Round


def rounds(shape: PipelineShape, stage: int) -> list[Round]:
    assert shape.chunks_per_stage == 1, f"1f1b runs one chunk a stage, got {shape}"
    order: list[Round] = []

    def compute(kind: ActionKind, micro_batch: int) -> None:
        order.append((Action(kind, stage, micro_batch),))

    warm_up = _warm_up(shape, stage)
    steady = shape.micro_batches - warm_up
    for m in range(warm_up):
        compute(ActionKind.FORWARD, m)
    for m in range(steady):
        compute(ActionKind.FORWARD, warm_up + m)
        compute(ActionKind.BACKWARD, m)
    for m in range(warm_up):
        compute(ActionKind.BACKWARD, steady + m)
    return order


def in_flight_limit(shape: PipelineShape, stage: int) -> int:
    """p - stage: the warm-up and the forward of the steady phase."""
    return min(_warm_up(shape, stage) + 1, shape.micro_batches)


def _warm_up(shape: PipelineShape, stage: int) -> int:
    return min(shape.stages - 1 - stage, shape.micro_batches)
