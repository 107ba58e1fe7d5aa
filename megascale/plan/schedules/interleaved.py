"""Interleaved 1F1B (Megatron-LM, 2104.04473 section 2.2; MegaScale 2, Figure 2).

Each stage holds v chunks, which divides the pipeline bubble by v and multiplies transfers by v.
Micro-batches pass in groups of p: a group goes through the stage's first chunk, then the next.

    forward k:  group k // (p*v), chunk number k % (p*v) // p, micro-batch group*p + k % p
    backward k: the same with the chunks reversed
    warm-up     min(2*(p - 1 - stage) + (v - 1)*p, m*v) forwards
    steady      m*v - warm-up times: one forward and one backward, a single round of transfers
    cool-down   warm-up backwards
"""

from __future__ import annotations

from megascale.plan.actions import Action, ActionKind, PipelineShape
from megascale.plan.schedules.rounds import Round


def rounds(shape: PipelineShape, stage: int) -> list[Round]:
    assert shape.micro_batches % shape.stages == 0, (
        f"interleaved 1f1b takes micro-batches in multiples of the stages, got {shape}"
    )
    total = shape.micro_batches * shape.chunks_per_stage
    warm_up = _warm_up(shape, stage)
    steady = total - warm_up
    return [
        *((_forward(shape, stage, k),) for k in range(warm_up)),
        *((_forward(shape, stage, warm_up + k), _backward(shape, stage, k)) for k in range(steady)),
        *((_backward(shape, stage, steady + k),) for k in range(warm_up)),
    ]


def in_flight_limit(shape: PipelineShape, stage: int) -> int:
    """In chunks: the warm-up and the forward of the steady phase."""
    total = shape.micro_batches * shape.chunks_per_stage
    return min(_warm_up(shape, stage) + 1, total)


def _warm_up(shape: PipelineShape, stage: int) -> int:
    p, v = shape.stages, shape.chunks_per_stage
    return min(2 * (p - 1 - stage) + (v - 1) * p, shape.micro_batches * v)


def _forward(shape: PipelineShape, stage: int, k: int) -> Action:
    number, micro_batch = _position(shape, k)
    return Action(ActionKind.FORWARD, shape.chunks_of(stage)[number], micro_batch)


def _backward(shape: PipelineShape, stage: int, k: int) -> Action:
    number, micro_batch = _position(shape, k)
    return Action(ActionKind.BACKWARD, shape.chunks_of(stage)[-1 - number], micro_batch)


def _position(shape: PipelineShape, k: int) -> tuple[int, int]:
    """(chunk number within the stage, micro-batch) of the k-th forward."""
    p, v = shape.stages, shape.chunks_per_stage
    return k % (p * v) // p, k // (p * v) * p + k % p
