"""Where a shared head stands in a schedule (`parallel/shared_head.py`): a meeting of all stages.

In every stage's list, HEAD of a micro-batch comes after as many computes (weights' halves not
counted) as in the last stage's, where it follows the last chunk's forward of that micro-batch at
once; in the cool-down, before the backwards that would otherwise run ahead of it. In the steady
phase all stages are about equally far in their lists, so nobody waits long, and what is in flight
does not grow.

By simulation (tests/plan), forward 1, backward 2, head 1.26 in all, 2 stages of 2 chunks, 16
micro-batches: 106.1 of work, 109.1 with the shared head (the pipeline's own bubble is 3), 119.2
with the whole head on the last stage. With 4 stages: 101.0, 111.0 and 125.2. More than MOST_STAGES
are refused: at the first meeting stage 0 would not have taken what the last must send before it.
With one chunk a stage the last stage has no other work between its forward and its backward, and
every meeting costs a forward: not offered. Coupled transfers would wait for a receive that the
other stage posts behind the meeting: refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale.plan.actions import INPUT_GRADIENTS, Action, ActionKind, PipelineShape
from megascale.plan.schedules.rounds import Round

MOST_STAGES = 4


def with_heads(
    shape: PipelineShape, stage: int, rounds: Sequence[Round], *, of_last_stage: Sequence[Round]
) -> list[Round]:
    """`rounds` of `stage` with its HEAD actions."""
    places = _places(shape, of_last_stage)
    progress = _Progress()
    next_head = 0
    found: list[Round] = []
    for round_ in rounds:
        computes: list[Action] = []
        for compute in round_:
            after = progress.with_(compute)
            while next_head < len(places) and places[next_head].is_passed_by(after, shape, stage):
                computes.append(Action(ActionKind.HEAD, shape.head_chunk, next_head))
                next_head += 1
            computes.append(compute)
            progress = after
        found.append(tuple(computes))
    left = range(next_head, shape.micro_batches)
    return [*found, *((Action(ActionKind.HEAD, shape.head_chunk, m),) for m in left)]


@dataclass(frozen=True)
class _Progress:
    """How far a stage is in its list."""

    computes: int = 0
    backwards: int = 0

    def with_(self, compute: Action) -> _Progress:
        return _Progress(
            self.computes + (compute.kind is not ActionKind.BACKWARD_WEIGHT),
            self.backwards + (compute.kind in INPUT_GRADIENTS),
        )

    def is_passed_by(self, other: _Progress, shape: PipelineShape, stage: int) -> bool:
        """Whether `other` of `stage` is farther than the last stage is here. Backwards of stage s
        come (p - 1 - s) rounds later; in the cool-down, where this stage has no forwards left
        between them, they would otherwise run ahead of the meeting that feeds them."""
        late = shape.stages - 1 - stage
        backwards = max(self.backwards - late, 0)
        return other.computes > self.computes or other.backwards > backwards


def _places(shape: PipelineShape, of_last_stage: Sequence[Round]) -> list[_Progress]:
    """By micro-batch: the last stage's progress when it has run the last chunk's forward."""
    places: dict[int, _Progress] = {}
    progress = _Progress()
    for compute in (compute for round_ in of_last_stage for compute in round_):
        progress = progress.with_(compute)
        if compute.kind is ActionKind.FORWARD and compute.chunk == shape.last_chunk:
            places[compute.micro_batch] = progress
    assert list(places) == list(range(shape.micro_batches)), places
    return list(places.values())
