"""What a schedule alone leaves idle: the pipeline's computes as they were measured, transfers free.

A stage runs its computes in the order of its actions; each begins when the stage is free and what
feeds it is there. What a stage then waits is the bubble: no faster network would take it away.
Whatever it waited beyond that in the run was communication.
"""

from __future__ import annotations

from collections import deque
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
    ActionKind.HEAD: "head",
}


def idle_ns(
    schedule: str,
    shape: PipelineShape,
    durations_ns: Mapping[Compute, int],
    *,
    shared_head: bool = False,
) -> tuple[int, ...]:
    """For each stage: how long it waits until the last stage to finish is done.

    durations_ns  of every compute, by span, of a stage's part of a shared head by ("head", stage,
                  micro-batch); what is absent takes no time (weight gradients that were computed
                  with those of another micro-batch). Inputs' halves say that the schedule's
                  backwards were cut (joined weight gradients)
    shared_head   HEAD is a meeting of all stages: it begins when the last of them is there
    """
    simulation = _Simulation(schedule, shape, durations_ns, shared_head)
    simulation.run()
    end = max(simulation.free_at)
    return tuple(end - busy for busy in simulation.busy)


class _Simulation:
    """Every stage's list of computes, and how far it is."""

    def __init__(
        self,
        schedule: str,
        shape: PipelineShape,
        durations_ns: Mapping[Compute, int],
        shared_head: bool,
    ) -> None:
        self.shape, self.shared_head = shape, shared_head
        halves = any(name == "backward_input" for name, _, _ in durations_ns)
        self._durations = durations_ns
        self._left = [
            deque(
                action
                for action in build_stage(
                    schedule, shape, stage, shared_head=shared_head, split_backward=halves
                )
                if action.kind in COMPUTES
            )
            for stage in range(shape.stages)
        ]
        kinds = {action.kind for actions in self._left for action in actions}
        (self._input_gradient,) = kinds & INPUT_GRADIENTS
        self._done: dict[Action, int] = {}
        self.free_at, self.busy = [0] * shape.stages, [0] * shape.stages

    def run(self) -> None:
        while any(self._left):
            moved = [self._advance(stage) for stage in range(self.shape.stages)]
            assert any(moved), f"the schedule of {self.shape} does not end"

    def _advance(self, stage: int) -> bool:
        """Compute as far as what is there allows."""
        moved = False
        while self._left[stage]:
            action = self._left[stage][0]
            feeds = self._feeding(action)
            if any(feed not in self._done for feed in feeds):
                break
            ready = max([0, *(self._done[feed] for feed in feeds)])
            if action.kind is not ActionKind.HEAD:
                self._compute(stage, action, ready)
            elif all(left and left[0] == action for left in self._left):
                ready = max([ready, *self.free_at])
                for other in range(self.shape.stages):
                    self._compute(other, action, ready)
            else:
                break
            moved = True
        return moved

    def _compute(self, stage: int, action: Action, ready_ns: int) -> None:
        self._left[stage].popleft()
        place = stage if action.kind is ActionKind.HEAD else action.chunk
        took = self._durations.get((SPAN_OF[action.kind], place, action.micro_batch), 0)
        self.free_at[stage] = max(self.free_at[stage], ready_ns) + took
        self.busy[stage] += took
        self._done[action] = max(self._done.get(action, 0), self.free_at[stage])

    def _feeding(self, action: Action) -> list[Action]:
        """The computes of other chunks that `action` needs the result of."""
        chunk, m = action.chunk, action.micro_batch
        if action.kind is ActionKind.FORWARD and chunk > 0:
            return [Action(ActionKind.FORWARD, chunk - 1, m)]
        if action.kind is ActionKind.HEAD:
            return [Action(ActionKind.FORWARD, self.shape.last_chunk, m)]
        if action.kind is not self._input_gradient:
            return []
        if chunk < self.shape.last_chunk:
            return [Action(self._input_gradient, chunk + 1, m)]
        return [Action(ActionKind.HEAD, self.shape.head_chunk, m)] if self.shared_head else []
