"""Pipeline schedules by name (MegaScale 2, 3.2). To add one: a file like its siblings, a row here.

A generator gives the rounds of computes of a stage; transfers are inserted by `transfers.py`, the
same for all. `build_stage` makes one stage's list alone, so that a rank of a long pipeline does not
pay for the others.

Where weight gradients are joined over micro-batches, `split_backward` cuts the backwards of every
schedule in halves, so that a gradient leaves before a burst of them and not behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megascale.plan.actions import Action, PipelineShape, Schedule
from megascale.plan.schedules import forward_only, gpipe, interleaved, one_f_one_b, zero_bubble
from megascale.plan.schedules.rounds import Round
from megascale.plan.schedules.shared_head import MOST_STAGES, with_heads
from megascale.plan.schedules.transfers import PREFETCH_COMPUTES, coupled, decoupled


@dataclass(frozen=True)
class ScheduleKind:
    """A generator of rounds and the bounds that it promises.

    deferred_limit  most weights' halves that wait at a time; of a schedule that splits backward
    can_share_head  whether stages keep in step closely enough for a shared head
    """

    rounds: Callable[[PipelineShape, int], list[Round]]
    in_flight_limit: Callable[[PipelineShape, int], int]
    forward_only: bool = False
    deferred_limit: Callable[[PipelineShape, int], int] | None = None
    can_share_head: bool = False

    @property
    def splits_backward(self) -> bool:
        return self.deferred_limit is not None

    def in_halves(self) -> ScheduleKind:
        """With each whole backward cut in two, the weights' half right behind the inputs'."""
        if self.splits_backward or self.forward_only:
            return self
        return replace(
            self,
            rounds=lambda shape, stage: zero_bubble.split(self.rounds(shape, stage), delay=0),
            deferred_limit=lambda shape, _stage: zero_bubble.limit(shape, 0),
        )


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(gpipe.rounds, gpipe.in_flight_limit),
    "1f1b": ScheduleKind(one_f_one_b.rounds, one_f_one_b.in_flight_limit),
    "interleaved_1f1b": ScheduleKind(
        interleaved.rounds, interleaved.in_flight_limit, can_share_head=True
    ),
    "zb_h1": ScheduleKind(
        zero_bubble.h1_rounds, one_f_one_b.in_flight_limit, deferred_limit=zero_bubble.limit
    ),
    "interleaved_zb": ScheduleKind(
        zero_bubble.interleaved_rounds,
        interleaved.in_flight_limit,
        deferred_limit=zero_bubble.limit,
        can_share_head=True,
    ),
    "forward_only": ScheduleKind(
        forward_only.rounds, forward_only.in_flight_limit, forward_only=True, can_share_head=True
    ),
}

TRANSFERS: dict[str, Callable[[PipelineShape, Sequence[Round]], list[Action]]] = {
    "decoupled": decoupled,
    "coupled": coupled,
}


def build_stage(
    name: str,
    shape: PipelineShape,
    stage: int,
    *,
    transfers: str = "decoupled",
    shared_head: bool = False,
    split_backward: bool = False,
) -> tuple[Action, ...]:
    """The actions of one stage, in order.

    split_backward  no whole backwards: a schedule that has them gets each one's halves in its place
    """
    assert name in SCHEDULES, f"schedule is one of {list(SCHEDULES)}, got {name!r}"
    assert transfers in TRANSFERS, f"transfers is one of {list(TRANSFERS)}, got {transfers!r}"
    assert 0 <= stage < shape.stages, (stage, shape)
    kind = _kind(name, split_backward)
    assert kind.forward_only or shape.micro_batches >= shape.stages, (
        f"{shape.micro_batches} micro-batches cannot fill {shape.stages} stages"
    )
    rounds = kind.rounds(shape, stage)
    if shared_head:
        assert kind.can_share_head, f"{name} has no places for a shared head"
        assert shape.stages <= MOST_STAGES, f"{shape.stages} stages cannot share a head"
        assert transfers == "decoupled", (
            "coupled transfers wait for a stage that waits for the head"
        )
        last = kind.rounds(shape, shape.stages - 1)
        rounds = with_heads(shape, stage, rounds, of_last_stage=last)
    return tuple(TRANSFERS[transfers](shape, rounds))


def _kind(name: str, split_backward: bool) -> ScheduleKind:
    return SCHEDULES[name].in_halves() if split_backward else SCHEDULES[name]


def build_schedule(
    name: str,
    *,
    stages: int,
    chunks_per_stage: int,
    micro_batches: int,
    transfers: str,
    shared_head: bool = False,
    split_backward: bool = False,
) -> Schedule:
    """The actions of every stage, with the bounds that the schedule promises."""
    shape = PipelineShape(stages, chunks_per_stage, micro_batches)
    actions = tuple(
        build_stage(
            name,
            shape,
            s,
            transfers=transfers,
            shared_head=shared_head,
            split_backward=split_backward,
        )
        for s in range(stages)
    )
    kind = _kind(name, split_backward)
    return Schedule(
        name=name,
        shape=shape,
        transfers=transfers,
        actions=actions,
        in_flight_limits=tuple(kind.in_flight_limit(shape, s) for s in range(stages)),
        deferred_limits=tuple(
            kind.deferred_limit(shape, s) if kind.deferred_limit else 0 for s in range(stages)
        ),
        receive_buffer_limit=1 + PREFETCH_COMPUTES,
        forward_only=kind.forward_only,
        splits_backward=kind.splits_backward,
        shared_head=shared_head,
    )
