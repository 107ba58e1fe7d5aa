"""Draw a pipeline schedule as text: one row a stage, one column a unit of time.

    python examples/draw_schedule.py 1f1b 4 1 8
    python examples/draw_schedule.py interleaved_1f1b 4 2 8
    python examples/draw_schedule.py zb_h1 4 1 8

The arguments: schedule, stages, chunks a stage, micro-batches. A forward takes one unit and a
backward two, or each half of it one; transfers take none. A digit is a micro-batch (mod 10) in
forward, a letter one in backward (a is 0), a capital in its weights' half; a dot is idle. It needs
no torch: schedules are plain data.
"""

from __future__ import annotations

import sys

from megascale.plan.actions import INPUT_GRADIENTS, Action, ActionKind, Schedule
from megascale.plan.check import check_schedule
from megascale.plan.schedules import build_schedule

FORWARD, WEIGHTS = ActionKind.FORWARD, ActionKind.BACKWARD_WEIGHT
UNITS = {FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.BACKWARD_INPUT: 1, WEIGHTS: 1}


def finish_times(schedule: Schedule) -> dict[Action, int]:
    """When each compute ends, if it starts as soon as its stage is free and its input is there."""
    computes = [[a for a in actions if a.kind in UNITS] for actions in schedule.actions]
    finished: dict[Action, int] = {}
    free = [0] * schedule.shape.stages
    while any(computes):
        for stage, waiting in enumerate(computes):
            while waiting and needs(schedule, waiting[0]) <= finished.keys():
                action = waiting.pop(0)
                ready = max((finished[a] for a in needs(schedule, action)), default=0)
                free[stage] = max(free[stage], ready) + UNITS[action.kind]
                finished[action] = free[stage]
    return finished


def needs(schedule: Schedule, action: Action) -> set[Action]:
    """The computes whose results `action` reads."""
    chunk, m = action.chunk, action.micro_batch
    if action.kind is FORWARD:
        return {Action(FORWARD, chunk - 1, m)} if chunk else set()
    if action.kind is WEIGHTS:
        return {Action(ActionKind.BACKWARD_INPUT, chunk, m)}
    assert action.kind in INPUT_GRADIENTS, action
    later = {Action(action.kind, chunk + 1, m)} if chunk < schedule.shape.last_chunk else set()
    return later | {Action(FORWARD, chunk, m)}


def draw(schedule: Schedule) -> str:
    """The timeline, and the share of time that a stage idles."""
    finished = finish_times(schedule)
    width = max(finished.values())
    rows = [["."] * width for _ in range(schedule.shape.stages)]
    for action, end in finished.items():
        mark = action.micro_batch % 10
        text = str(mark) if action.kind is FORWARD else "abcdefghij"[mark]
        text = text.upper() if action.kind is WEIGHTS else text
        for unit in range(end - UNITS[action.kind], end):
            rows[schedule.shape.stage_of(action.chunk)][unit] = text
    idle = sum(row.count(".") for row in rows) / (width * len(rows))
    lines = [f"stage {stage}  {''.join(row)}" for stage, row in enumerate(rows)]
    return "\n".join([*lines, f"idle {idle:.1%} of {width} units"])


def main() -> None:
    name, *sizes = sys.argv[1:] or ["1f1b", "4", "1", "8"]
    if len(sizes) != 3 or not all(size.isdecimal() for size in sizes):
        print(
            "usage: python examples/draw_schedule.py SCHEDULE STAGES CHUNKS MICRO_BATCHES",
            file=sys.stderr,
        )
        sys.exit(2)
    stages, chunks, micro_batches = map(int, sizes)
    schedule = build_schedule(
        name,
        stages=stages,
        chunks_per_stage=chunks,
        micro_batches=micro_batches,
        transfers="decoupled",
    )
    bounds = check_schedule(schedule)
    print(draw(schedule))
    print(f"activations in flight a stage: {', '.join(str(b.in_flight) for b in bounds)}")


if __name__ == "__main__":
    main()
