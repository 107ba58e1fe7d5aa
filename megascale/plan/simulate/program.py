"""A step as lists of plain numbers, one a stage: what the engine runs.

`lowering.py` makes them from the action lists that the trainer executes, `buckets.py` adds the
data-parallel communication. Six operations are enough, as every way of waiting is one of two:

    COMPUTE label, seconds      on the compute stream; slower while something is communicated
    PAUSE   label, seconds      the same, and nothing slows it (loading, fixed costs of a step)
    POST    transfer            this stage is ready for its end of a transfer
    NEED    transfer            wait until it is over
    START   item, seconds       queue a collective on the stage's data-parallel stream
    AWAIT   item                wait until it is over

A transfer begins when all its parties have posted it, the one before it on its channel is over
(NCCL's kernels on a communicator's stream) and its links are free. Sends and receives have two
parties; the collectives of a shared head have all stages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

COMPUTE, PAUSE, POST, NEED, START, AWAIT = range(6)

Op = tuple[int, int, float]


class Label(NamedTuple):
    """What a span says of itself; `what` is the payload, bucket or part where there are several."""

    kind: str
    chunk: int | None = None
    micro_batch: int | None = None
    what: str = ""


class Wire(NamedTuple):
    """What a channel joins: one payload from one stage to another, or the stages of a head."""

    payload: str
    source: int
    destination: int


@dataclass
class _Channel:
    stages: tuple[int, ...]
    numbers: list[int] = field(default_factory=list)
    posted: dict[int, int] = field(default_factory=lambda: defaultdict(int))


@dataclass
class TransferTable:
    """All transfers of a step, by number, as columns.

    following  the next one on the same channel, -1 for the last
    stages     who meets in it; the sender first
    """

    seconds: list[float] = field(default_factory=list)
    stages: list[tuple[int, ...]] = field(default_factory=list)
    following: list[int] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    _channels: dict[Wire, _Channel] = field(default_factory=dict)

    def post(
        self, wire: Wire, stage: int, stages: tuple[int, ...], label: Label, seconds: float
    ) -> int:
        """The number of the transfer that `stage` posts next on `wire`."""
        channel = self._channels.get(wire)
        if channel is None:
            channel = self._channels[wire] = _Channel(stages)
        place = channel.posted[stage]
        channel.posted[stage] = place + 1
        if place == len(channel.numbers):
            self._append(channel, label, seconds)
        return channel.numbers[place]

    def _append(self, channel: _Channel, label: Label, seconds: float) -> None:
        number = len(self.seconds)
        if channel.numbers:
            self.following[channel.numbers[-1]] = number
        channel.numbers.append(number)
        self.seconds.append(seconds)
        self.stages.append(channel.stages)
        self.following.append(-1)
        self.labels.append(label)


@dataclass
class StageProgram:
    """What one stage does in a step.

    labels      of COMPUTE and PAUSE
    items       of START: the stage's data-parallel collectives, in order
    data_loss   share of its speed that a compute loses beside them
    """

    stage: int
    data_loss: float = 0.0
    ops: list[Op] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    items: list[Label] = field(default_factory=list)

    def label(self, kind: str, chunk: int | None = None, micro_batch: int | None = None) -> int:
        self.labels.append(Label(kind, chunk, micro_batch))
        return len(self.labels) - 1

    def compute(self, label: int, seconds: float) -> None:
        if seconds > 0.0:
            self.ops.append((COMPUTE, label, seconds))

    def pause(self, kind: str, seconds: float) -> None:
        if seconds > 0.0:
            self.ops.append((PAUSE, self.label(kind), seconds))

    def post(self, transfer: int) -> None:
        self.ops.append((POST, transfer, 0.0))

    def need(self, transfer: int) -> None:
        self.ops.append((NEED, transfer, 0.0))

    def start(self, label: Label, seconds: float) -> int:
        """The number of the item."""
        self.items.append(label)
        self.ops.append((START, len(self.items) - 1, seconds))
        return len(self.items) - 1

    def wait_for(self, item: int) -> None:
        self.ops.append((AWAIT, item, 0.0))


@dataclass
class Program:
    """A step of all stages.

    transfer_loss  share of its speed that a compute loses while its stage sends or receives
    """

    stages: list[StageProgram]
    transfers: TransferTable
    transfer_loss: float = 0.0


def loss_of(slow_down: float) -> float:
    """Share of its speed that a compute loses which takes `slow_down` times as long."""
    assert slow_down >= 1.0, f"a slow-down is at least 1, got {slow_down}"
    return 1.0 - 1.0 / slow_down
