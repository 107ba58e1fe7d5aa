"""The computes of a pipeline's stages in an order in which they can be timed one after the other.

The orders within stages are those of `plan.schedules`, which a run follows; here they are merged,
so that each compute comes behind the one whose result it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megascale.plan.actions import COMPUTES, INPUT_GRADIENTS, Action, ActionKind, PipelineShape
from megascale.plan.schedules import build_stage


@dataclass(frozen=True)
class Compute:
    """One compute of a stage: which action, of which place in the stage's order, what feeds it."""

    stage: int
    action: Action
    feeder: Action | None


class Program:
    """The computes of all stages in an order in which each comes behind what feeds it."""

    def __init__(self, schedule: str, shape: PipelineShape) -> None:
        self.shape = shape
        of_stage = [
            [a for a in build_stage(schedule, shape, s) if a.kind in COMPUTES]
            for s in range(shape.stages)
        ]
        self.kinds = {a.kind for actions in of_stage for a in actions}
        (self._input_gradient,) = self.kinds & INPUT_GRADIENTS
        self.computes: list[Compute] = []
        done: set[Action] = set()
        left = [list(reversed(actions)) for actions in of_stage]
        while any(left):
            for stage, actions in enumerate(left):
                while actions and (feeder := self._feeder(actions[-1])) in (None, *done):
                    action = actions.pop()
                    self.computes.append(Compute(stage, action, feeder))
                    done.add(action)

    def _feeder(self, action: Action) -> Action | None:
        """The compute of another chunk that this one needs the result of."""
        chunk, m = action.chunk, action.micro_batch
        if action.kind is ActionKind.FORWARD and chunk > 0:
            return Action(ActionKind.FORWARD, chunk - 1, m)
        if action.kind is self._input_gradient and chunk < self.shape.last_chunk:
            return Action(self._input_gradient, chunk + 1, m)
        return None
