"""The vocabulary of a pipeline schedule: actions, channels, and the schedule itself, as pure data.

MegaScale 3.2 (pipeline parallel). The model is cut into `stages * chunks_per_stage` chunks; chunk c
lives on stage c % stages. A schedule is one list of actions a stage. Computing actions run in list
order; transfers are posted in list order and complete on their own, and a compute waits only for
the receive that feeds it.

A zero-bubble schedule (2401.10241), and any other where weight gradients are joined, cuts BACKWARD
in two: BACKWARD_INPUT makes the gradient that the stage before waits for, BACKWARD_WEIGHT the
gradients of the weights, which nobody waits for before the end of the step. A schedule has whole
backwards or halves, never both.

With a shared head (`parallel/shared_head.py`) every stage has a HEAD action for each micro-batch:
forward and backward of its rows of the vocabulary. It is a meeting of all stages, as its softmax is
over the rows of all. Its chunk is `PipelineShape.head_chunk`, a number that no chunk of layers has.

Invariant: `Action.chunk` is always one that the acting stage holds. So SEND_ACTIVATION of chunk
c carries the output of FORWARD c and meets RECV_ACTIVATION of chunk c + 1, and SEND_GRADIENT of
chunk c carries the gradient of the input of chunk c and meets RECV_GRADIENT of chunk c - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class ActionKind(Enum):
    """What a stage does; the values are the short forms of `Schedule.render`."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"
    HEAD = "H"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    WAIT = "W"  # before the named compute, wait for every transfer posted (coupled transfers)


INPUT_GRADIENTS = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})
"""Take the gradient of a chunk's output, make that of its input, and free what forward kept."""

COMPUTES = INPUT_GRADIENTS | {ActionKind.FORWARD, ActionKind.BACKWARD_WEIGHT, ActionKind.HEAD}
SENDS = frozenset({ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT})
RECEIVES = frozenset({ActionKind.RECV_ACTIVATION, ActionKind.RECV_GRADIENT})


class Payload(StrEnum):
    """What a channel carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, order=True)
class Channel:
    """One direction between two stages for one payload: a communicator of its own."""

    source: int
    destination: int
    payload: Payload


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a stage's list. `peer_stage` is the other end of a transfer, else None."""

    kind: ActionKind
    chunk: int
    micro_batch: int
    peer_stage: int | None = None

    def channel(self, stage: int) -> Channel:
        """The channel that this transfer of `stage` uses."""
        assert self.peer_stage is not None, f"{self} of stage {stage} is not a transfer"
        activation = self.kind in (ActionKind.SEND_ACTIVATION, ActionKind.RECV_ACTIVATION)
        payload = Payload.ACTIVATION if activation else Payload.GRADIENT
        if self.kind in SENDS:
            return Channel(stage, self.peer_stage, payload)
        return Channel(self.peer_stage, stage, payload)

    def __str__(self) -> str:
        peer = "" if self.peer_stage is None else f"@{self.peer_stage}"
        return f"{self.kind.value}{self.chunk}.{self.micro_batch}{peer}"


@dataclass(frozen=True)
class PipelineShape:
    """How many stages, chunks a stage and micro-batches a step; where each chunk lives."""

    stages: int
    chunks_per_stage: int
    micro_batches: int

    def __post_init__(self) -> None:
        for name in ("stages", "chunks_per_stage", "micro_batches"):
            assert getattr(self, name) >= 1, f"{name} is at least 1, got {getattr(self, name)}"
        assert self.stages > 1 or self.chunks_per_stage == 1, (
            f"{self.chunks_per_stage} chunks on a single stage; chunks need several stages"
        )

    @property
    def num_chunks(self) -> int:
        return self.stages * self.chunks_per_stage

    @property
    def last_chunk(self) -> int:
        return self.num_chunks - 1

    @property
    def head_chunk(self) -> int:
        """The number of a shared head in actions; every stage holds a part of it."""
        return self.num_chunks

    def stage_of(self, chunk: int) -> int:
        return chunk % self.stages

    def chunks_of(self, stage: int) -> range:
        return range(stage, self.num_chunks, self.stages)


@dataclass(frozen=True)
class Schedule:
    """A step of the whole pipeline: `actions[stage]` in order, and the bounds that it promises.

    in_flight_limits[stage]   most (chunk, micro-batch) pairs forwarded and not yet backwarded
    deferred_limits[stage]    most of them whose input's half is done and whose weights' is not
    receive_buffer_limit      most receives posted and not yet consumed, on any stage
    """

    name: str
    shape: PipelineShape
    transfers: str
    actions: tuple[tuple[Action, ...], ...]
    in_flight_limits: tuple[int, ...]
    deferred_limits: tuple[int, ...]
    receive_buffer_limit: int
    forward_only: bool = False
    splits_backward: bool = False
    shared_head: bool = False

    @property
    def backward_kind(self) -> ActionKind:
        """The compute that makes the gradient of a chunk's input."""
        return ActionKind.BACKWARD_INPUT if self.splits_backward else ActionKind.BACKWARD

    @property
    def compute_kinds(self) -> tuple[ActionKind, ...]:
        """What is computed once for each chunk of layers and micro-batch."""
        if self.forward_only:
            return (ActionKind.FORWARD,)
        if self.splits_backward:
            return ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
        return ActionKind.FORWARD, ActionKind.BACKWARD

    def render(self) -> str:
        """One line a stage, for snapshots and for reading."""
        lines = (
            f"stage {stage}: " + " ".join(map(str, actions))
            for stage, actions in enumerate(self.actions)
        )
        return "\n".join(lines) + "\n"
