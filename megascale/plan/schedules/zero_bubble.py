"""Zero-bubble schedules: 1F1B and interleaved 1F1B with backward cut in two (2401.10241, ZB-H1).

The order of forwards and of the inputs' halves is that of the schedule below; the weights' halves,
which nobody waits for, follow `stage` backwards later and the rest at the end. Then

* the gradient on its way back through the stages waits for inputs' halves alone, and the weights'
  halves that are left fill the cool-down. With F, B, W the times of a chunk's forward and of its
  two halves, and p stages, the idle time of a stage is (p - 1) (F + B - W) where the schedule below
  has (p - 1) (F + B + W): a third, where the three are equal (tests/plan simulates both);
* no stage keeps more than stage 0 does below: what a later stage has less in flight is what it
  defers. In whole micro-batches of a chunk, forward to weights' half, at most p for one chunk a
  stage and stage 0's in-flight bound for several.

A longer delay fills bubbles that unequal halves leave, at the price of more kept; equal ones gain
nothing from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megascale.plan.actions import Action, ActionKind, PipelineShape
from megascale.plan.schedules import interleaved, one_f_one_b
from megascale.plan.schedules.rounds import Round


def h1_rounds(shape: PipelineShape, stage: int) -> list[Round]:
    """1F1B in halves."""
    return split(one_f_one_b.rounds(shape, stage), delay=stage)


def interleaved_rounds(shape: PipelineShape, stage: int) -> list[Round]:
    """Interleaved 1F1B in halves."""
    return split(interleaved.rounds(shape, stage), delay=stage)


def limit(shape: PipelineShape, stage: int) -> int:
    """The delay, and the one whose input's half has just ended."""
    return min(stage + 1, shape.micro_batches * shape.chunks_per_stage)


def split(rounds: Sequence[Round], delay: int) -> list[Round]:
    """Each backward in halves, the weights' half in the round of the `delay`-th backward after."""
    waiting: deque[Action] = deque()
    found: list[Round] = []
    for round_ in rounds:
        computes: list[Action] = []
        for compute in round_:
            if compute.kind is not ActionKind.BACKWARD:
                computes.append(compute)
                continue
            chunk, m = compute.chunk, compute.micro_batch
            computes.append(Action(ActionKind.BACKWARD_INPUT, chunk, m))
            waiting.append(Action(ActionKind.BACKWARD_WEIGHT, chunk, m))
            if len(waiting) > delay:
                computes.append(waiting.popleft())
        found.append(tuple(computes))
    return [*found, *((weights,) for weights in waiting)]
