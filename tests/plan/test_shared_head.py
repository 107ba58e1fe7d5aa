"""A shared head in a schedule: what it gains by simulation, and what the checker says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megascale.config import parse_config
from megascale.errors import ConfigError
from megascale.plan.actions import Action, ActionKind, Schedule
from megascale.plan.check import ScheduleError, check_schedule
from megascale.plan.schedules import build_schedule, build_stage
from megascale.plan.schedules.shared_head import MOST_STAGES
from megascale.plan.simulate import step_time
from megascale.plan.simulate.lowering import Costs

HEAD = 0.42  # of a layer, which is a chunk here: forward 1, backward 2


def _schedule(stages: int = 2, micro_batches: int = 16, name: str = "interleaved_1f1b") -> Schedule:
    return build_schedule(
        name,
        stages=stages,
        chunks_per_stage=2,
        micro_batches=micro_batches,
        transfers="decoupled",
        shared_head=True,
    )


def _cost(schedule: Schedule) -> Costs:
    """The whole head with the last chunk, or a share of it on every stage."""
    units = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}

    def cost(action: Action) -> float:
        if action.kind is ActionKind.HEAD:
            return 2 * HEAD / schedule.shape.stages
        if action.chunk == schedule.shape.head_chunk:  # the weights' half of a shared head
            return HEAD / schedule.shape.stages
        holds_head = action.chunk == schedule.shape.last_chunk and not schedule.shared_head
        return units[action.kind] * (1 + HEAD * holds_head)

    return cost


@pytest.mark.parametrize(("stages", "idle"), [(2, 3.0), (4, 10.0)])
def test_a_shared_head_is_faster_than_one_on_the_last_stage(stages: int, idle: float) -> None:
    shared = _schedule(stages)
    plain = build_schedule(
        "interleaved_1f1b",
        stages=stages,
        chunks_per_stage=2,
        micro_batches=16,
        transfers="decoupled",
    )
    work = 16 * (2 * 3 + 3 * HEAD / stages)
    shared_time = step_time(shared, _cost(shared))
    assert shared_time == pytest.approx(work + idle)
    assert step_time(plain, _cost(plain)) > 1.09 * shared_time
    assert shared.in_flight_limits == plain.in_flight_limits


def test_the_configuration_refuses_what_the_schedule_refuses() -> None:
    """Its number of stages is written twice: the configuration imports no plan."""

    def parse(stages: int) -> None:
        parse_config(
            {
                "model": {"num_layers": 16},
                "parallelism": {
                    "pipeline_parallel_size": stages,
                    "virtual_pipeline_size": 2,
                    "share_head": True,
                },
                "training": {"global_batch_size": 8 * stages},
            }
        )

    parse(MOST_STAGES)
    with pytest.raises(ConfigError, match=f"up to {MOST_STAGES} can share it"):
        parse(MOST_STAGES + 1)


def test_orders_by_hand() -> None:
    schedule = _schedule(micro_batches=2)
    texts = [" ".join(str(a) for a in acts if a.peer_stage is None) for acts in schedule.actions]
    assert texts[1] == "F1.0 F1.1 F3.0 H4.0 B3.0 F3.1 H4.1 B3.1 B1.0 B1.1"
    assert texts[0] == "F0.0 F0.1 F2.0 H4.0 F2.1 H4.1 B2.0 B2.1 B0.0 B0.1"
    cut = [
        " ".join(
            map(
                str,
                build_stage(
                    schedule.name, schedule.shape, s, shared_head=True, split_backward=True
                ),
            )
        )
        for s in (0, 1)
    ]
    assert "H4.0 RA3.1@0 BI3.0 SG3.0@0 BW3.0 F3.1 H4.1" in cut[1]


def _edited(schedule: Schedule, stage: int, old: int, new: int) -> Schedule:
    """The schedule with the HEAD of one micro-batch moved by a number of places."""
    head = Action(ActionKind.HEAD, schedule.shape.head_chunk, old)
    acts = [a for a in schedule.actions[stage] if a != head]
    place = schedule.actions[stage].index(head) + new
    lists = list(schedule.actions)
    lists[stage] = (*acts[:place], head, *acts[place:])
    return replace(schedule, actions=tuple(lists))


def test_the_checker_finds_heads_out_of_order_and_a_meeting_that_never_comes() -> None:
    schedule = _schedule(micro_batches=4)
    check_schedule(schedule)
    with pytest.raises(ScheduleError, match=r"stage 1, action H4\.0: needs F3\.0 before it"):
        check_schedule(_edited(schedule, 1, 0, -4))
    with pytest.raises(ScheduleError, match=r"B3\.0: needs H4\.0 before it"):
        check_schedule(_edited(schedule, 1, 0, 3))
    with pytest.raises(ScheduleError, match="deadlock"):
        check_schedule(_edited(schedule, 0, 0, -4))  # before the forward that feeds it
    missing = [tuple(a for a in acts if str(a) != "H4.3") for acts in schedule.actions]
    with pytest.raises(ScheduleError, match=r"H4\.3: is never computed"):
        check_schedule(replace(schedule, actions=(missing[0], schedule.actions[1])))


def test_what_cannot_share_a_head_is_refused() -> None:
    shape = _schedule().shape
    with pytest.raises(AssertionError, match="coupled transfers wait"):
        build_stage("interleaved_1f1b", shape, 0, transfers="coupled", shared_head=True)
    with pytest.raises(AssertionError, match="gpipe has no places"):
        build_stage("gpipe", replace(shape, chunks_per_stage=1), 0, shared_head=True)
    with pytest.raises(AssertionError, match="8 stages cannot share"):
        _schedule(8)
