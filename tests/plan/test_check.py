"""The checker finds each kind of broken schedule, and names the stage and the action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megascale.plan.actions import Action, ActionKind, Schedule
from megascale.plan.check import ScheduleError, check_schedule
from megascale.plan.schedules import build_schedule

Edit = Callable[[list[Action]], list[Action]]


def _schedule(transfers: str = "decoupled") -> Schedule:
    return build_schedule(
        "1f1b", stages=2, chunks_per_stage=1, micro_batches=3, transfers=transfers
    )


def _edited(schedule: Schedule, stage: int, edit: Edit) -> Schedule:
    actions = list(schedule.actions)
    actions[stage] = tuple(edit(list(actions[stage])))
    return replace(schedule, actions=tuple(actions))


def _find(actions: list[Action], text: str) -> int:
    return [str(action) for action in actions].index(text)


def _without(text: str) -> Edit:
    return lambda actions: [action for action in actions if str(action) != text]


def _moved_to_front(text: str) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        return [actions.pop(_find(actions, text)), *actions]

    return edit


def _with_extra(action: Action) -> Edit:
    return lambda actions: [*actions, action]


@pytest.mark.parametrize(
    ("stage", "edit", "message"),
    [
        (0, _without("B0.2"), r"stage 0, action B0\.2: is never computed"),
        (1, _with_extra(Action(ActionKind.FORWARD, 1, 0)), r"F1\.0: is computed 2 times"),
        (0, _with_extra(Action(ActionKind.FORWARD, 1, 0)), r"F1\.0: is not for this stage"),
        (1, _moved_to_front("B1.0"), r"stage 1, action B1\.0: needs F1\.0 before it"),
        (0, _moved_to_front("SA0.1@1"), r"stage 0, action SA0\.1@1: needs F0\.1 before it"),
        (1, _without("RA1.1@0"), r"stage 1, action F1\.1: needs RA1\.1@0 before it"),
        (0, _without("SA0.2@1"), r"stage 0, action F0\.2: SA0\.2@1 is missing"),
        (0, _moved_to_front("RG0.1@1"), r"stage 0, action RG0\.1@1: meets SG1\.0@0 of stage 1"),
        (
            0,
            _with_extra(Action(ActionKind.RECV_GRADIENT, 0, 7, 1)),
            r"stage 0, action RG0\.7@1: is never sent",
        ),
        (
            1,
            _with_extra(Action(ActionKind.RECV_ACTIVATION, 1, 0, 0)),
            r"stage 1, action RA1\.0@0: stands twice",
        ),
    ],
)
def test_a_broken_list_is_named(stage: int, edit: Edit, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_schedule(_edited(_schedule(), stage, edit))


def _with_wait_after(text: str) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        i = _find(actions, text)
        wait = Action(ActionKind.WAIT, actions[i].chunk, actions[i].micro_batch)
        return [*actions[: i + 1], wait, *actions[i + 1 :]]

    return edit


def test_a_deadlock_is_named() -> None:
    """Both neighbours wait for their sends before they post the receives that these need."""
    one_waits = _edited(_schedule("coupled"), 0, _with_wait_after("SA0.1@1"))
    check_schedule(one_waits)
    both_wait = _edited(one_waits, 1, _with_wait_after("SG1.0@0"))
    with pytest.raises(ScheduleError, match=r"stage 0, action W0\.1: deadlock"):
        check_schedule(both_wait)


def test_bounds_are_held() -> None:
    too_tight = replace(_schedule(), in_flight_limits=(1, 1))
    with pytest.raises(
        ScheduleError, match=r"F0\.1: needs 2 activations in flight, the limit is 1"
    ):
        check_schedule(too_tight)
    one_buffer = replace(_schedule(), receive_buffer_limit=1)
    with pytest.raises(ScheduleError, match="needs 2 receive buffers, the limit is 1"):
        check_schedule(one_buffer)
