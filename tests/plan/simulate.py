"""When each compute of a schedule runs, if transfers take no time: an event simulation.

A compute starts as soon as its stage is free and what it needs is there; stages run their lists in
order. A shared head starts when all stages are at it. Nothing of the runtime is here, and nothing
of the checker.
"""

from __future__ import annotations

from collections.abc import Callable

from megascale.plan.actions import COMPUTES, INPUT_GRADIENTS, Action, ActionKind, Schedule

Cost = Callable[[Action], float]


def by_kind(forward: float, backward_input: float, backward_weight: float) -> Cost:
    """Costs of a chunk's work, the same for all chunks; a whole backward is both halves."""
    costs = {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD: backward_input + backward_weight,
        ActionKind.BACKWARD_INPUT: backward_input,
        ActionKind.BACKWARD_WEIGHT: backward_weight,
    }
    return lambda action: costs[action.kind]


def end_times(schedule: Schedule, cost: Cost) -> list[dict[Action, float]]:
    """By stage: when each of its computes ends."""
    waiting = [[a for a in actions if a.kind in COMPUTES] for actions in schedule.actions]
    ended: list[dict[Action, float]] = [{} for _ in waiting]
    everywhere: dict[Action, float] = {}
    free = [0.0] * len(waiting)
    while any(waiting):
        before = len(everywhere)
        for stage, computes in enumerate(waiting):
            while computes and _needs(schedule, computes[0]) <= everywhere.keys():
                if computes[0].kind is ActionKind.HEAD:
                    break
                action = computes.pop(0)
                ready = max((everywhere[a] for a in _needs(schedule, action)), default=0.0)
                free[stage] = max(free[stage], ready) + cost(action)
                ended[stage][action] = everywhere[action] = free[stage]
        at_head = {computes[0] if computes else None for computes in waiting}
        head = next(iter(at_head))
        if len(at_head) == 1 and head is not None and head.kind is ActionKind.HEAD:
            assert _needs(schedule, head) <= everywhere.keys(), head
            start = max(*free, *(everywhere[a] for a in _needs(schedule, head)))
            for stage, computes in enumerate(waiting):
                computes.pop(0)
                free[stage] = ended[stage][head] = everywhere[head] = start + cost(head)
        assert len(everywhere) > before, f"no stage can go on: {[w[:1] for w in waiting]}"
    return ended


def step_time(schedule: Schedule, cost: Cost) -> float:
    return max(max(ended.values()) for ended in end_times(schedule, cost))


def _needs(schedule: Schedule, action: Action) -> set[Action]:
    chunk, m = action.chunk, action.micro_batch
    if action.kind is ActionKind.FORWARD:
        return {Action(ActionKind.FORWARD, chunk - 1, m)} if chunk else set()
    last, head_chunk = schedule.shape.last_chunk, schedule.shape.head_chunk
    if action.kind is ActionKind.HEAD:
        return {Action(ActionKind.FORWARD, last, m)}
    if action.kind in INPUT_GRADIENTS:
        own = {Action(ActionKind.FORWARD, chunk, m)}
        if chunk < last:
            return own | {Action(action.kind, chunk + 1, m)}
        return own | ({Action(ActionKind.HEAD, head_chunk, m)} if schedule.shared_head else set())
    return {Action(ActionKind.BACKWARD_INPUT, chunk, m)}
