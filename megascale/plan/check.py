"""Prove a schedule before it runs (MegaScale 3.2): order, pairing, progress, bounds.

1. Each (chunk, micro-batch) is forwarded and backwarded exactly once, after what it needs.
2. On each channel the k-th receive is for the value of the k-th send: NCCL and gloo match transfers
   of a communicator by order alone, so a swap would hand over the wrong tensor in silence.
3. No deadlock, where a send meets its receive and nothing is buffered: a compute blocks until its
   receive has arrived; a send blocks while SEND_WINDOW sends before it on the channel are unmet;
   WAIT blocks until every transfer that its stage posted is met; HEAD blocks until every stage is
   at the same HEAD.
4. Bounds: activations in flight, deferred weight gradients, receive buffers and communicators of
   each stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from megascale.plan.actions import (
    COMPUTES,
    INPUT_GRADIENTS,
    RECEIVES,
    SENDS,
    Action,
    ActionKind,
    Channel,
    Schedule,
)
from megascale.plan.schedules.transfers import SEND_WINDOW, receives_for, sends_of

MAX_COMMUNICATORS = 4  # activations in and out, gradients in and out: a ring has two neighbours


class ScheduleError(Exception):
    """A schedule that would compute the wrong thing, hang or break its bounds: a fault of ours."""


@dataclass(frozen=True)
class StageBounds:
    """What a stage needs at its worst moment."""

    in_flight: int
    deferred: int
    receive_buffers: int
    communicators: int


def check_schedule(schedule: Schedule) -> list[StageBounds]:
    """The bounds of each stage. Raises ScheduleError naming the stage and the action."""
    for stage in range(schedule.shape.stages):
        _check_computes(schedule, stage)
        _check_local_order(schedule, stage)
    _check_pairs(schedule)
    _check_progress(schedule)
    return [_check_bounds(schedule, stage) for stage in range(schedule.shape.stages)]


def _error(schedule: Schedule, stage: int, action: Action, problem: str) -> ScheduleError:
    return ScheduleError(
        f"{schedule.name} ({schedule.transfers}, {schedule.shape}): "
        f"stage {stage}, action {action}: {problem}"
    )


def _check_computes(schedule: Schedule, stage: int) -> None:
    expected = {
        Action(kind, chunk, m)
        for kind in schedule.compute_kinds
        for chunk in schedule.shape.chunks_of(stage)
        for m in range(schedule.shape.micro_batches)
    }
    if schedule.shared_head:
        head = schedule.shape.head_chunk
        expected |= {Action(ActionKind.HEAD, head, m) for m in range(schedule.shape.micro_batches)}
    counts = Counter(action for action in schedule.actions[stage] if action.kind in COMPUTES)
    for action, count in counts.items():
        if action not in expected:
            raise _error(schedule, stage, action, "is not for this stage to compute")
        if count > 1:
            raise _error(schedule, stage, action, f"is computed {count} times")
    for action in sorted(expected - counts.keys(), key=str):
        raise _error(schedule, stage, action, "is never computed")


def _check_local_order(schedule: Schedule, stage: int) -> None:
    """Each action stands after what it needs, once, and each value that another stage needs is
    sent."""
    seen: set[Action] = set()
    for action in schedule.actions[stage]:
        if action in seen and action.kind is not ActionKind.WAIT:
            raise _error(schedule, stage, action, "stands twice")
        for needed in _needs(schedule, stage, action):
            if needed not in seen:
                raise _error(schedule, stage, action, f"needs {needed} before it")
        seen.add(action)
    for action in schedule.actions[stage]:
        if action.kind not in COMPUTES:
            continue
        for send in sends_of(schedule.shape, action):
            if send not in seen:
                raise _error(schedule, stage, action, f"{send} is missing")


def _head_of(schedule: Schedule, action: Action) -> list[Action]:
    """The shared head's action for the micro-batch of `action`."""
    head = Action(ActionKind.HEAD, schedule.shape.head_chunk, action.micro_batch)
    return [head] if schedule.shared_head else []


def _needs(schedule: Schedule, stage: int, action: Action) -> list[Action]:
    """What must stand before `action` in the list of the same stage."""
    forward = Action(ActionKind.FORWARD, action.chunk, action.micro_batch)
    backward = Action(schedule.backward_kind, action.chunk, action.micro_batch)
    match action.kind:
        case ActionKind.FORWARD:
            return receives_for(schedule.shape, action)
        case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
            head = _head_of(schedule, action) if action.chunk == schedule.shape.last_chunk else []
            return [forward, *head, *receives_for(schedule.shape, action)]
        case ActionKind.BACKWARD_WEIGHT:
            return [backward]
        case ActionKind.HEAD:
            last = schedule.shape.last_chunk
            makes_input = schedule.shape.stage_of(last) == stage
            return [Action(ActionKind.FORWARD, last, action.micro_batch)] if makes_input else []
        case ActionKind.SEND_ACTIVATION:
            return [forward]
        case ActionKind.SEND_GRADIENT:
            return [backward]
        case _:
            return []


def _check_pairs(schedule: Schedule) -> None:
    sent: dict[Channel, list[Action]] = defaultdict(list)
    received: dict[Channel, list[Action]] = defaultdict(list)
    for stage, actions in enumerate(schedule.actions):
        for action in actions:
            if action.kind in SENDS:
                sent[action.channel(stage)].append(action)
            elif action.kind in RECEIVES:
                received[action.channel(stage)].append(action)
    for channel in sorted(sent.keys() | received.keys()):
        sends, receives = sent[channel], received[channel]
        for send, receive in zip(sends, receives, strict=False):
            if receive != _receive_of(send, channel.source):
                problem = f"meets {send} of stage {channel.source}"
                raise _error(schedule, channel.destination, receive, problem)
        met = min(len(sends), len(receives))
        for send in sends[met:]:
            raise _error(schedule, channel.source, send, "is never received")
        for receive in receives[met:]:
            raise _error(schedule, channel.destination, receive, "is never sent")


def _receive_of(send: Action, source: int) -> Action:
    """The receive, on the other stage, that takes what `send` carries."""
    if send.kind is ActionKind.SEND_ACTIVATION:
        return Action(ActionKind.RECV_ACTIVATION, send.chunk + 1, send.micro_batch, source)
    return Action(ActionKind.RECV_GRADIENT, send.chunk - 1, send.micro_batch, source)


def _check_progress(schedule: Schedule) -> None:
    """Run all stages as far as they come; whoever does not reach the end is in a deadlock."""
    run = _Simulation(schedule)
    stages = range(schedule.shape.stages)
    while any(run.advance(stage) for stage in stages):
        pass
    for stage, actions in enumerate(schedule.actions):
        if run.position[stage] < len(actions):
            blocked = actions[run.position[stage]]
            raise _error(schedule, stage, blocked, "deadlock: what it waits for never comes")


class _Simulation:
    """Stages that post transfers at once and block where they consume."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.position = [0] * schedule.shape.stages
        self.sent: Counter[Channel] = Counter()
        self.received: Counter[Channel] = Counter()
        self.order: dict[tuple[int, Action], int] = {}  # a receive's number on its channel
        self.channels: list[set[Channel]] = [set() for _ in self.position]
        self.at_head: dict[int, set[int]] = defaultdict(set)  # stages, by micro-batch

    def advance(self, stage: int) -> bool:
        """Run `stage` until it blocks or ends; whether it moved."""
        actions = self.schedule.actions[stage]
        start = self.position[stage]
        while self.position[stage] < len(actions) and self._ready(
            stage, actions[self.position[stage]]
        ):
            self._post(stage, actions[self.position[stage]])
            self.position[stage] += 1
        return self.position[stage] > start

    def _ready(self, stage: int, action: Action) -> bool:
        if action.kind is ActionKind.HEAD:
            self.at_head[action.micro_batch].add(stage)
            return len(self.at_head[action.micro_batch]) == self.schedule.shape.stages
        if action.kind in COMPUTES:
            feeds = receives_for(self.schedule.shape, action)
            return all(self.order[stage, r] < self.sent[r.channel(stage)] for r in feeds)
        if action.kind is ActionKind.WAIT:
            # only this stage posts its own end, so both counts equal means that all have met
            return all(self._met(stage, channel) for channel in self.channels[stage])
        if action.kind in SENDS:
            channel = action.channel(stage)
            return self.sent[channel] - self.received[channel] < SEND_WINDOW
        return True

    def _met(self, stage: int, channel: Channel) -> bool:
        sent, received = self.sent[channel], self.received[channel]
        return received >= sent if channel.source == stage else sent >= received

    def _post(self, stage: int, action: Action) -> None:
        if action.peer_stage is None:
            return
        channel = action.channel(stage)
        self.channels[stage].add(channel)
        if action.kind in SENDS:
            self.sent[channel] += 1
        else:
            self.order[stage, action] = self.received[channel]
            self.received[channel] += 1


def _check_bounds(schedule: Schedule, stage: int) -> StageBounds:
    in_flight = deferred = buffers = most_in_flight = most_deferred = most_buffers = 0
    channels: set[Channel] = set()
    for action in schedule.actions[stage]:
        if action.peer_stage is not None:
            channels.add(action.channel(stage))
        if action.kind in RECEIVES:
            buffers += 1
        if action.kind in COMPUTES:
            buffers -= len(receives_for(schedule.shape, action))
        if action.kind is ActionKind.FORWARD and not schedule.forward_only:
            in_flight += 1
        if action.kind in INPUT_GRADIENTS:
            in_flight -= 1
        if action.kind is ActionKind.BACKWARD_INPUT:
            deferred += 1
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            deferred -= 1
        most_in_flight = max(most_in_flight, in_flight)
        most_deferred = max(most_deferred, deferred)
        most_buffers = max(most_buffers, buffers)
        for what, count, limit in (
            ("activations in flight", in_flight, schedule.in_flight_limits[stage]),
            ("deferred weight gradients", deferred, schedule.deferred_limits[stage]),
            ("receive buffers", buffers, schedule.receive_buffer_limit),
            ("communicators", len(channels), MAX_COMMUNICATORS),
        ):
            if count > limit:
                raise _error(schedule, stage, action, f"needs {count} {what}, the limit is {limit}")
    return StageBounds(most_in_flight, most_deferred, most_buffers, len(channels))
